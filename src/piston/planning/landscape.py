"""What is known of other VLA pre-trainings: reported, derived and not reported kept apart, each with its source."""

from dataclasses import dataclass

from piston.planning.figure import NOT_REPORTED, Cell, Figure, Section, Table, derived, quoted

PI0, PI05 = "arXiv:2410.24164", "arXiv:2504.16054"
OPENVLA, OCTO, RT2, RT1, RDT = (
    "arXiv:2406.09246", "arXiv:2405.12213", "arXiv:2307.15818", "arXiv:2212.06817", "arXiv:2410.07864",
)  # fmt: skip
UNVERIFIED = "; unverified"


@dataclass(frozen=True)
class Model:
    """One row. Cells are text with its source, figures, or not reported."""

    name: str
    source: str
    parameters: Cell = NOT_REPORTED
    data: Cell = NOT_REPORTED
    steps: Figure = NOT_REPORTED
    batch: Figure = NOT_REPORTED
    epochs: Figure = NOT_REPORTED
    hardware: str = "not reported"
    wall: Cell = NOT_REPORTED
    control: Cell = NOT_REPORTED

    def timesteps(self) -> Figure:
        """steps × batch where both are reported: derived, never reported."""
        if self.steps.value is None or self.batch.value is None:
            return NOT_REPORTED
        return derived(self.steps.value * self.batch.value, "frames", "steps × batch")


def models() -> list[Model]:
    """The rows of the table."""
    q = quoted
    return [
        Model("π0", PI0, q(3.3e9, "", PI0), "~10 000 h own data, 903 M timesteps", q(700_000, "", f"{PI0} fig. 7"),
              control=q(50, "Hz", PI0, 0, 50)),
        Model("π0.5", PI05, data="~400 h mobile manipulation and other sources",
              steps=q(280_000, "", f"{PI05}; + 80 000 post-training"), control=q(50, "Hz", PI05)),
        Model("OpenVLA", OPENVLA, q(7e9, "", OPENVLA), "970 k demonstrations", batch=q(2048, "", OPENVLA),
              epochs=q(27, "", OPENVLA), hardware="64×A100", wall="14 d; 21.5 k A100·h"),
        Model("Octo-Base", OCTO, q(93e6, "", OCTO), "800 k trajectories", q(300_000, "", OCTO), q(2048, "", OCTO),
              hardware="TPU v4-128", wall="14 h"),
        Model("Octo-Small", OCTO, q(27e6, "", OCTO), "800 k trajectories", q(300_000, "", OCTO), q(2048, "", OCTO),
              hardware="TPU v4-128", wall="8 h"),
        Model("RT-2", RT2, "5 B, 12 B, 55 B", "RT-1's robot data and web data",
              q(1_000_000, "", f"{RT2} app. E, 80 k–1 M per variant", 80_000, 1_000_000),
              control=q(3, "Hz", f"{RT2}; 1–3 Hz at 55 B, about 5 Hz at 5 B", 1, 5)),
        Model("RT-1", RT1, q(35e6, "", RT1), "~130 k episodes, 700+ tasks, 13 robots",
              control=q(3, "Hz", RT1 + UNVERIFIED)),
        Model("RDT-1B", RDT, q(1.2e9, "", RDT), "1 M+ trajectories, 46 sets, 21 TB", q(1_000_000, "", RDT),
              hardware="48×H100", wall="~1 month"),
        Model("openpi, DROID", "openpi README", data="DROID", steps=q(100_000, "", "openpi README"),
              batch=q(256, "", "openpi README"), hardware="8×H100", wall="~2 d"),
        Model("openpi, pi05_libero", "openpi training/config.py", data="LIBERO", steps=q(30_000, "", "openpi"),
              batch=q(256, "", "openpi")),
        Model("open-pi-zero", "github.com/allenzren/open-pi-zero", data="BridgeData / Fractal",
              steps=q(30_000, "", "its README; ≈ 19 k / 30 k", 19_000, 30_000),
              batch=q(1024, "", "its README"), hardware="one L40 or H100 node", wall="1.5–2 d / 8–12 h"),
        Model("pi-zero-pytorch", "github.com/lucidrains/pi-zero-pytorch", data="architecture only, no recipe"),
    ]  # fmt: skip


def trap() -> dict[str, Figure]:
    """OpenVLA's often-quoted step count, and why it is none."""
    demonstrations, epochs, batch = 970_000, 27, 2048
    hours = 64 * 14 * 24
    return {
        "27 × 970 k / 2048": derived(epochs * demonstrations / batch, "steps if a trajectory were one sample"),
        "frames per trajectory": NOT_REPORTED,
        "64 A100 × 14 d": derived(hours, "A100·h", "agrees with the reported 21.5 k"),
    }


def section() -> Section:
    """The landscape part of the report."""
    rows: list[tuple[Cell, ...]] = [
        (
            m.name,
            m.parameters,
            m.data,
            m.steps,
            m.batch,
            m.timesteps(),
            m.epochs,
            m.hardware,
            m.wall,
            m.control,
            m.source,
        )
        for m in models()
    ]
    columns = ("model", "parameters", "data", "steps", "batch", "timesteps", "epochs", "hardware", "wall-clock",
               "control",
               "source")  # fmt: skip
    notes = (
        "π0's batch is not published: its timesteps seen are a range, 700 k × the batch one believes in.",
        "The OpenVLA trap: it reports 27 epochs and batch 2048 but no steps. Dividing 27 × 970 k demonstrations by "
        "2048 gives "
        "the often-quoted 12.8 k; a demonstration is a trajectory of many frames and the batch counts frames, so the "
        "steps "
        "are larger by the frames per trajectory, which are not reported. The step count stays not reported.",
        "'unverified' marks what has not been checked against the paper.",
    )
    return Section("landscape", "Landscape", trap(), (Table(columns, tuple(rows)),), notes)
