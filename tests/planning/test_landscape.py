"""Reported, derived and not reported are never mixed, and each reported value has its source."""

from piston.planning.figure import NOT_REPORTED, Figure
from piston.planning.landscape import models, section, trap


def test_all_rows_are_there() -> None:
    names = " ".join(m.name for m in models())
    for name in (
        "π0 ",
        "π0.5",
        "OpenVLA",
        "Octo",
        "RT-2",
        "RT-1",
        "RDT-1B",
        "openpi",
        "open-pi-zero",
        "pi-zero-pytorch",
    ):
        assert name in names + " "


def test_timesteps_are_derived_only_from_two_reported_values() -> None:
    by_name = {m.name: m for m in models()}
    octo = by_name["Octo-Base"].timesteps()
    assert (octo.kind, octo.value) == ("derived", 300_000 * 2048)
    for name in ("π0", "π0.5", "OpenVLA", "RT-1", "RDT-1B"):
        assert by_name[name].timesteps() == NOT_REPORTED


def test_every_quoted_figure_names_its_source() -> None:
    for model in models():
        for cell in (model.parameters, model.steps, model.batch, model.epochs, model.control):
            if isinstance(cell, Figure) and cell.value is not None:
                assert cell.kind == "quoted", model.name
                assert cell.source, model.name


def test_nothing_unreported_has_a_number() -> None:
    assert NOT_REPORTED.text() == "not reported"
    assert NOT_REPORTED.to_json()["value"] is None


def test_the_openvla_trap_is_explained() -> None:
    assert round(trap()["27 × 970 k / 2048"].number, -2) == 12_800
    assert trap()["64 A100 × 14 d"].number == 21_504
    assert trap()["frames per trajectory"] == NOT_REPORTED
    assert next(m for m in models() if m.name == "OpenVLA").steps == NOT_REPORTED
    assert any("trajectory" in note for note in section().notes)


def test_unchecked_claims_say_so() -> None:
    control = next(m for m in models() if m.name == "RT-1").control
    assert isinstance(control, Figure)
    assert control.source.endswith("unverified")
