"""Prints the resolved values of openpi's π0 and π0.5 training configurations as JSON; nothing is downloaded.

`.venv-live/bin/python scripts/openpi_live/configs.py`
"""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: F401  stand-ins for what openpi imports and this does not use


class _AnyIndex:
    def __getitem__(self, item: Any) -> Any:
        return item


def _stand_in_for_tyro() -> None:
    tyro = types.ModuleType("tyro")
    tyro.MISSING = "<missing>"  # type: ignore[attr-defined]
    tyro.conf = types.SimpleNamespace(Suppress=_AnyIndex())  # type: ignore[attr-defined]
    sys.modules["tyro"] = tyro
    sys.modules.setdefault("tqdm", types.ModuleType("tqdm"))
    pi0_fast = types.ModuleType("openpi.models.pi0_fast")
    pi0_fast.Pi0FASTConfig = type("Pi0FASTConfig", (), {  # type: ignore[attr-defined]
        "__init__": lambda self, **fields: None, "get_freeze_filter": lambda self: None,
    })  # fmt: skip
    sys.modules["openpi.models.pi0_fast"] = pi0_fast


_stand_in_for_tyro()

from openpi import transforms  # noqa: E402
from openpi.models import pi0_config  # noqa: E402
from openpi.models import tokenizer as tokenizer_module  # noqa: E402
from openpi.policies import aloha_policy  # noqa: E402
from openpi.training import config as config_module  # noqa: E402


def values_of(config: Any) -> dict[str, Any]:
    """One configuration, its data transforms built and read back."""
    model = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(config.model)}
    model["frozen"] = "nothing" if "Nothing" in type(config.freeze_filter).__name__ else "by rule"
    return {
        "model": {name: value for name, value in model.items() if isinstance(value, int | str | bool)},
        "schedule": {"kind": type(config.lr_schedule).__name__, **dataclasses.asdict(config.lr_schedule)},
        "optimizer": {"kind": type(config.optimizer).__name__, **dataclasses.asdict(config.optimizer)},
        "train": {
            name: getattr(config, name)
            for name in (
                "ema_decay", "seed", "batch_size", "num_workers", "num_train_steps", "log_interval", "save_interval",
                "keep_period", "overwrite", "exp_name",
            )
        },
        "start": getattr(config.weight_loader, "params_path", None),
        "data": data_of(config),
    }  # fmt: skip


def data_of(config: Any) -> dict[str, Any]:
    assets = config.data.assets
    if config.name == "paligemma_diffusion_droid":  # its transforms cannot be built
        return {"asset_id": assets.asset_id, "assets_dir": assets.assets_dir}
    made = config.data.create(Path("assets"), config.model)
    masks = [list(map(bool, t.mask)) for t in made.data_transforms.inputs if isinstance(t, transforms.DeltaActions)]
    aloha = [t.adapt_to_pi for t in made.data_transforms.inputs if isinstance(t, aloha_policy.AlohaInputs)]
    prompts = [t.prompt for t in made.model_transforms.inputs if isinstance(t, transforms.InjectDefaultPrompt)]
    tokens = [t for t in made.model_transforms.inputs if isinstance(t, transforms.TokenizePrompt)]
    repacked = [dict(transforms.flatten_dict(t.structure)) for t in made.repack_transforms.inputs]
    return {
        "kind": type(config.data).__name__,
        "repo_id": made.repo_id,
        "asset_id": assets.asset_id,
        "assets_dir": assets.assets_dir,
        "prompt_from_task": made.prompt_from_task,
        "use_quantile_norm": made.use_quantile_norm,
        "action_keys": list(made.action_sequence_keys),
        "delta_masks": masks,
        "adapt_to_pi": aloha,
        "default_prompt": prompts[0] if prompts else None,
        "discrete_state_input": tokens[0].discrete_state_input if tokens else None,
        "columns": repacked[0] if repacked else {},
    }


def main() -> None:
    tokenizer_module.PaligemmaTokenizer = lambda *args: None
    config_module.DataConfigFactory._load_norm_stats = lambda self, directory, asset: None
    found = {
        config.name: values_of(config)
        for config in config_module._CONFIGS
        if isinstance(config.model, pi0_config.Pi0Config)
    }
    sys.stdout.write(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
