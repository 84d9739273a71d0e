"""Actions of a checkpoint in openpi's JAX code: `openpi_jax.py DIR`, in `.venv-live`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "openpi_live"))

import jax
import numpy as np
import reference


def main(directory: Path) -> None:
    arch = json.loads((directory / "arch.json").read_text())
    inputs = dict(np.load(directory / "inputs.npz"))
    model = reference.Model(arch, "float32")
    params = reference.restored(str(directory / "openpi-jax" / "params"), model.shapes)
    observation = reference.observation(arch, inputs)
    with jax.default_matmul_precision("highest"):
        actions = model.build(params).sample_actions(
            jax.random.key(0), observation, num_steps=10, noise=inputs["noise"]
        )
    np.save(directory / "actions_openpi_jax.npy", np.asarray(actions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
