"""GPU catalogue: what the datasheets say, with source and year, and options to override each value."""

import dataclasses
import difflib
import math
from dataclasses import dataclass

from piston.config.schema import require


@dataclass(frozen=True)
class Gpu:
    """Datasheet values, dense (no sparsity). TFLOP/s, GB (10⁹ bytes), GB/s; link and PCIe are per direction.

    `network` is the usual inter-node network per GPU (one NIC of the vendor's own eight-way machine); None: there is
    no usual one. `measured` is a bfloat16 matrix product's measured TFLOP/s where somebody published one.
    """

    name: str
    bfloat16: float | int
    float32: float | int
    memory: float | int
    bandwidth: float | int
    link: float | int
    pcie: float | int
    network: float | int | None
    source: str
    measured: float | int | None = None
    measured_source: str = ""

    def peak(self, precision: str) -> float | int:
        """TFLOP/s of matrix products in this precision."""
        return self.bfloat16 if precision == "bfloat16" else self.float32


_PCIE4, _PCIE5 = 32.0, 64.0
_H200_MEASURED = "large bfloat16 matrix product on an H200, random data; performance notes, 2026"
# name, bf16, fp32 (no TF32), memory, bandwidth, link per direction (NVLink, else PCIe), PCIe, NIC per GPU, source
_ROWS = (
    ("A100", 312, 19.5, 80, 2039, 300, _PCIE4, 25, "NVIDIA A100 80GB SXM datasheet, 2021"),
    ("A800", 312, 19.5, 80, 2039, 200, _PCIE4, 25, "NVIDIA A800 80GB SXM datasheet, 2022"),
    ("H100", 989, 67, 80, 3350, 450, _PCIE5, 50, "NVIDIA H100 SXM datasheet, 2023"),
    ("H800", 989, 67, 80, 3350, 200, _PCIE5, 50, "NVIDIA H800 SXM datasheet, 2023"),
    ("H20", 148, 44, 96, 4000, 450, _PCIE5, 50, "NVIDIA H20 datasheet as reprinted, 2023"),
    ("H200", 989, 67, 141, 4800, 450, _PCIE5, 50, "NVIDIA H200 SXM datasheet, 2024"),
    ("B200", 2250, 80, 180, 8000, 900, _PCIE5, 50, "NVIDIA HGX/DGX B200 datasheet, 2024"),
    ("L40S", 362.05, 91.6, 48, 864, _PCIE4, _PCIE4, None, "NVIDIA L40S datasheet, 2023"),
    ("A6000", 154.8, 38.7, 48, 768, 56.25, _PCIE4, None, "NVIDIA RTX A6000 / GA102 whitepaper, 2021"),
    ("RTX 4090", 165.2, 82.6, 24, 1008, _PCIE4, _PCIE4, None, "NVIDIA Ada whitepaper, 2022"),
    ("RTX 5090", 209.5, 104.8, 32, 1792, _PCIE5, _PCIE5, None, "NVIDIA RTX Blackwell whitepaper, 2025"),
    ("RTX PRO 6000", 503.8, 126, 96, 1792, _PCIE5, _PCIE5, None, "NVIDIA RTX PRO Blackwell whitepaper, 2025"),
)
CATALOGUE: dict[str, Gpu] = {
    name: Gpu(
        name, float(bf16), float(fp32), float(memory), float(bandwidth), float(link), pcie,
        None if nic is None else float(nic), source,
        *((790.0, _H200_MEASURED) if name == "H200" else (None, "")),
    )
    for name, bf16, fp32, memory, bandwidth, link, pcie, nic, source in _ROWS
}  # fmt: skip


def _plain(name: str) -> str:
    letters = "".join(c for c in name.upper() if c.isalnum())
    return letters.removeprefix("NVIDIA").removeprefix("GEFORCE")


def find_gpu(name: str, **overrides: float | int | None) -> Gpu:
    """The catalogue's entry, with any of its numbers replaced. An unknown name raises, naming the nearest."""
    by_plain = {_plain(known): known for known in CATALOGUE}
    by_plain |= {_plain(known.removeprefix("RTX ")): known for known in CATALOGUE}
    found = by_plain.get(_plain(name))
    if found is None:
        nearest = by_plain[difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.0)[0]]
        raise ValueError(
            f"unknown GPU {name!r}; did you mean {nearest!r}? The catalogue has {', '.join(CATALOGUE)}; for another "
            "one "
            "take the nearest and give its own --peak-tflops, --memory-gb, --bandwidth-gbs and --link-gbs"
        )
    changes = {key: value for key, value in overrides.items() if value is not None}
    for key, value in changes.items():
        require(
            math.isfinite(value) and value > 0,
            f"--{key} for GPU {found} is {value}; it must be a positive finite number: correct it or leave it out",
        )
    if not changes:
        return CATALOGUE[found]
    gpu = CATALOGUE[found]
    if changes.keys() & {"bfloat16", "float32"}:
        gpu = dataclasses.replace(gpu, measured=None, measured_source="")
    return dataclasses.replace(gpu, **changes, source=f"{gpu.source}; {', '.join(sorted(changes))} given")
