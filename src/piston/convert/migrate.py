"""`piston migrate`: a training configuration of openpi or LeRobot → a Piston recipe file, and what it could not carry.

openpi's Python file is read as a syntax tree; no line of it runs. LeRobot's train_config.json is read as JSON.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from piston.config.recipes import recipe
from piston.config.robots import ALOHA, DROID, DROID_JOINT_POSITION, LIBERO, LIBERO_EXTRA_DELTA, ROBOTS, generic
from piston.config.schema import (
    CAMERAS,
    GEMMA_VARIANTS,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RobotConfig,
    RunConfig,
    TrainConfig,
)
from piston.weights.files import read_json


@dataclass
class Migrated:
    """A run, and a line for everything that it does not hold or holds differently."""

    run: RunConfig
    notes: list[str] = field(default_factory=list)


def migrate(path: Path, name: str | None = None) -> Migrated:
    """Reads openpi's Python file (`name` chooses one of its configurations) or LeRobot's train_config.json.

    Raises ValueError for a file that is neither, for a name that it lacks, and for models Piston does not train.
    """
    if path.suffix == ".py":
        return _openpi(path, name)
    if path.suffix == ".json":
        return _lerobot(path)
    raise ValueError(
        f"{path} ends with {path.suffix or 'nothing'}; expected openpi's configuration (.py, with TrainConfig(…)) or "
        "LeRobot's train_config.json: give one of these"
    )


# --- openpi: a syntax tree, read and never run -----------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call in the file: the last part of the function's name, and its keywords."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Unread:
    """An expression whose value only running it would tell."""

    text: str


Names = dict[str, ast.expr]


def _value(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List():
            return tuple(_value(item, names) for item in node.elts)
        case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {key.value: _value(value, names) for key, value in pairs if isinstance(key, ast.Constant)}
        case ast.UnaryOp(op=ast.USub()):
            inner = _value(node.operand, names)
            return -inner if isinstance(inner, int | float) else Unread(ast.unparse(node))
        case ast.Name() if node.id in names:
            return _value(names[node.id], {key: value for key, value in names.items() if key != node.id})
        case ast.Call() if (name := _last_name(node.func)) and all(word.arg for word in node.keywords):
            keywords = {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
            return Call(name, tuple(_value(arg, names) for arg in node.args), keywords)
    return Unread(ast.unparse(node))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _openpi(path: Path, name: str | None) -> Migrated:
    try:
        tree = ast.parse(path.read_text())
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error.msg} at line {error.lineno}; expected openpi's file") from error
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) == "TrainConfig")
    found: dict[str, Call] = {}
    for node in calls:
        call = _value(node, names)
        if isinstance(call, Call) and isinstance(call.keywords.get("name"), str):
            found[call.keywords["name"]] = call
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name is None or name not in found:
        raise ValueError(
            f"{path} has {len(found)} configurations, {'none is chosen' if name is None else f'none is {name!r}'}; "
            f"expected one of {', '.join(found) or 'TrainConfig(name=…, …), written out'}: choose with --name"
        )
    return _OpenpiReader(tree, names, found[name]).read()


class _OpenpiReader:
    """One TrainConfig(…) with openpi's defaults (training/config.py) for what it leaves out."""

    def __init__(self, tree: ast.Module, names: Names, call: Call) -> None:
        self.tree, self.names, self.fields = tree, names, dict(call.keywords)
        self.notes: list[str] = []

    def read(self) -> Migrated:
        name = self.fields.pop("name")
        model = self._model(self.fields.pop("model", Call("Pi0Config", (), {})))
        data = self._data(self.fields.pop("data", Call("FakeDataConfig", (), {})), model)
        workers = self._taken("num_workers", self.fields, int)
        if workers is not None and data.robot != DROID_JOINT_POSITION:
            data = replace(data, num_workers=workers)
        optim = self._optim()
        run = RunConfig(name=name, model=model, data=data, optim=optim, train=self._train())
        self._freeze(model)
        self._rest()
        return Migrated(run, self.notes)

    def _taken(self, name: str, fields: dict[str, Any], kind: type | tuple[type, ...]) -> Any:
        """A field's literal value, removed from `fields`; None, with a note, if it is written some other way."""
        value = fields.pop(name, None)
        if value is None or isinstance(value, kind):
            return value
        self.notes.append(f"{name} is {_text(value)}, which is not a plain value: set it yourself")
        return None

    def _model(self, call: Any) -> ModelConfig:
        if not isinstance(call, Call) or call.name != "Pi0Config":
            raise ValueError(
                f"the model is {_text(call)}, expected Pi0Config(…): Piston trains π0 and π0.5; choose another with "
                "--name"
            )
        fields = dict(call.keywords)
        pi05 = bool(self._taken("pi05", fields, bool))
        chosen: dict[str, Any] = {"pi05": pi05, "max_token_len": 200 if pi05 else 48, "discrete_state_input": pi05}
        for name, kind in (("action_dim", int), ("action_horizon", int), ("max_token_len", int), ("dtype", str)):
            if (value := self._taken(name, fields, kind)) is not None:
                chosen[name] = value
        if (value := self._taken("discrete_state_input", fields, bool)) is not None and pi05:
            chosen["discrete_state_input"] = value
        for theirs, ours in (("paligemma_variant", "paligemma"), ("action_expert_variant", "action_expert")):
            variant = self._taken(theirs, fields, str)
            if variant is not None:
                if variant not in GEMMA_VARIANTS:
                    raise ValueError(f"{theirs} is {variant!r}, expected one of {', '.join(GEMMA_VARIANTS)}: change it")
                chosen[ours] = GEMMA_VARIANTS[variant]
        self._left(fields, "model")
        return ModelConfig(**chosen)

    def _data(self, call: Any, model: ModelConfig) -> DataConfig:
        if not isinstance(call, Call):
            self.notes.append(f"the data is {_text(call)}: describe it yourself (docs/new-robot.md)")
            call = Call("FakeDataConfig", (), {})
        fields, kind = dict(call.keywords), call.name
        repo_id = self._taken("repo_id", fields, str)
        assets = self._assets(fields.pop("assets", None))
        base = fields.pop("base_config", None)
        base_fields = dict(base.keywords) if isinstance(base, Call) else {}
        from_task = bool(self._taken("prompt_from_task", base_fields, bool))
        prompt = self._taken("default_prompt", fields, str)
        robot = self._robot(kind, fields)
        self._left(base_fields, "base_config")
        self._left(fields, "data")
        if "RLDS" in kind:
            from_task = True  # its loader reads the instructions itself
            self.notes.append(
                "openpi reads RLDS here; Piston a LeRobot directory: convert it; its frame filter is lost"
            )
        return DataConfig(
            repo_id=repo_id or assets or "local",
            robot=robot,
            prompt_from_task=from_task,
            default_prompt=prompt,
            use_quantile_norm=model.pi05,
        )

    def _assets(self, call: Any) -> str | None:
        if not isinstance(call, Call):
            return None
        asset, directory = call.keywords.get("asset_id"), call.keywords.get("assets_dir")
        if isinstance(directory, str):
            self.notes.append(
                f"openpi takes statistics from {directory.rstrip('/')}/{asset or '<repo_id>'}: give them with "
                "--data.norm-stats"
            )
        return asset if isinstance(asset, str) else None

    def _robot(self, kind: str, fields: dict[str, Any]) -> RobotConfig:
        if kind == "LeRobotLiberoDataConfig":
            return LIBERO_EXTRA_DELTA if self._taken("extra_delta_transform", fields, bool) else LIBERO
        if kind == "LeRobotDROIDDataConfig":
            return DROID
        if kind == "RLDSDroidDataConfig":
            space = _text(fields.pop("action_space", ""))
            return DROID_JOINT_POSITION if space.endswith("JOINT_POSITION") else DROID
        if kind == "LeRobotAlohaDataConfig":
            return self._aloha(fields)
        if kind == "SimpleDataConfig":
            text = _text(fields.pop("data_transforms", ""))
            known = {"DroidInputs": DROID, "LiberoInputs": LIBERO, "AlohaInputs": ALOHA}
            for name, robot in known.items():
                if name in text:
                    return robot
        if kind == "FakeDataConfig":
            self.notes.append(
                "openpi makes random numbers here; Piston has none: describe the robot (docs/new-robot.md)"
            )
        return self._own(kind, fields)

    def _aloha(self, fields: dict[str, Any]) -> RobotConfig:
        delta = self._taken("use_delta_joint_actions", fields, bool)
        adapt = self._taken("adapt_to_pi", fields, bool)
        columns = _first_dict(fields.pop("repack_transforms", None))
        cameras = _cameras(columns) if columns else {CAMERAS[0]: "observation.images.top"}
        robot = replace(
            ALOHA,
            cameras=cameras,
            delta_mask=() if delta is False else ALOHA.delta_mask,
            adapt_to_pi=adapt is not False,
        )
        return _known(robot)

    def _own(self, kind: str, fields: dict[str, Any]) -> RobotConfig:
        """A data class of the user's, or one whose robot is written out in place: columns and delta mask are read."""
        body = next((n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == kind), None)
        calls = [n for n in ast.walk(body) if isinstance(n, ast.Call)] if body is not None else []
        repacks = [_value(c, self.names) for c in calls if _last_name(c.func) == "RepackTransform"]
        masks = [_value(c, self.names) for c in calls if _last_name(c.func) == "make_bool_mask"]
        columns = _first_dict(repacks[0] if repacks else fields.pop("repack_transforms", None)) or {}
        mask = next((m.args for m in masks if all(isinstance(n, int) for n in m.args)), ())
        width = sum(abs(n) for n in mask)
        states = tuple(v for k, v in columns.items() if k.split("/")[-1] in STATES and isinstance(v, str))
        action = columns.get("actions", "actions")
        robot = generic(
            name=kind.removeprefix("LeRobot").removesuffix("DataConfig").lower() or "generic",
            cameras=_cameras(columns) or {CAMERAS[0]: "observation.images.top"},
            state_keys=states or ("observation.state",),
            action_key=action if isinstance(action, str) else "actions",
            state_dim=width or 1,
            action_dim=width or 1,
            delta_mask=mask,
        )
        self.notes.append(
            f"the robot of {kind} was read from column names and delta mask: check cameras, state_keys, delta_mask, "
            f"and set state_dim and action_dim (here {width or 1}); its Inputs and Outputs classes are not carried"
        )
        return robot

    def _optim(self) -> OptimConfig:
        chosen: dict[str, Any] = {}
        schedule = self.fields.pop("lr_schedule", None)
        if isinstance(schedule, Call) and schedule.name in ("CosineDecaySchedule", "RsqrtDecaySchedule"):
            cosine = schedule.name.startswith("Cosine")
            chosen["schedule"] = "cosine" if cosine else "rsqrt"
            if not cosine:
                chosen["peak_lr"] = 5e-5  # openpi's default of this schedule
            fields = dict(schedule.keywords)
            for name in ("warmup_steps", "peak_lr", "decay_steps", "decay_lr", "timescale"):
                if (value := self._taken(name, fields, (int, float))) is not None:
                    chosen[name] = value
            self._left(fields, "lr_schedule")
        elif schedule is not None:
            self.notes.append(f"the schedule {_text(schedule)} is not one of Piston's: the default one is set")
        optimizer = self.fields.pop("optimizer", None)
        if isinstance(optimizer, Call) and optimizer.name == "AdamW":
            fields = dict(optimizer.keywords)
            for name in ("b1", "b2", "eps", "weight_decay", "clip_gradient_norm"):
                if (value := self._taken(name, fields, (int, float))) is not None:
                    chosen[name] = float(value)
            self._left(fields, "optimizer")
        elif optimizer is not None:
            self.notes.append(
                f"the optimizer {_text(optimizer)} is not AdamW: Piston's AdamW with openpi's values is set"
            )
        if "ema_decay" in self.fields:
            if self.fields["ema_decay"] is None:
                chosen["ema_decay"] = None
            elif (decay := self._taken("ema_decay", self.fields, float)) is not None:
                chosen["ema_decay"] = decay
            self.fields.pop("ema_decay", None)
        return OptimConfig(**chosen)

    def _train(self) -> TrainConfig:
        chosen: dict[str, Any] = {}
        for name, kind in (
            ("exp_name", str), ("project_name", str), ("seed", int), ("batch_size", int), ("num_train_steps", int),
            ("log_interval", int), ("save_interval", int), ("overwrite", bool), ("resume", bool),
        ):  # fmt: skip
            if (value := self._taken(name, self.fields, kind)) is not None:
                chosen[name] = value
        if "keep_period" in self.fields:
            chosen["keep_period"] = self._taken("keep_period", self.fields, int)
        if (directory := self._taken("checkpoint_base_dir", self.fields, str)) is not None:
            chosen["checkpoint_dir"] = Path(directory)
        if self._taken("wandb_enabled", self.fields, bool) is not False:
            self.notes.append("openpi logs to Weights & Biases by default, Piston when asked: --train.wandb")
        loader = self.fields.pop("weight_loader", None)
        if isinstance(loader, Call) and loader.name in ("CheckpointWeightLoader", "PaliGemmaWeightLoader"):
            start = loader.keywords.get("params_path", loader.args[0] if loader.args else None)
            if loader.name.startswith("PaliGemma"):
                self.notes.append(
                    "openpi starts from PaliGemma: --train.init pt_224.npz --train.init-except expert heads"
                )
            elif isinstance(start, str) and "://" not in start:
                chosen["init"] = Path(start)
            else:
                self.notes.append(f"openpi starts from {_text(start)}: download it and give it with --train.init")
        elif loader is not None and _text(loader) != "NoOpWeightLoader()":
            self.notes.append(f"the weight loader {_text(loader)} is not carried: give weights with --train.init")
        return TrainConfig(**chosen)

    def _freeze(self, model: ModelConfig) -> None:
        given, adapted = (
            self.fields.pop("freeze_filter", None),
            model.paligemma.lora_attn or model.action_expert.lora_attn,
        )
        rule = isinstance(given, Call) and given.name == "get_freeze_filter"
        rule = rule or (isinstance(given, Unread) and given.text.endswith(".get_freeze_filter()"))
        if adapted and not rule:
            self.notes.append(
                f"freeze_filter is {_text(given)}, with LoRA; Piston freezes by openpi's get_freeze_filter() then"
            )
        if given is not None and not rule:
            self.notes.append(f"freeze_filter {_text(given)} is not carried; Piston freezes groups: --model.freeze")

    def _rest(self) -> None:
        reasons = {
            "fsdp_devices": "sharding is chosen where Piston is started",
            "pytorch_weight_path": "--train.init takes these weights too",
            "pytorch_training_precision": "--model.dtype",
            "assets_base_dir": "--data.norm-stats",
            "policy_metadata": "Piston's policies carry none",
        }
        for name, value in self.fields.items():
            self.notes.append(f"{name}={_text(value)} is not carried: {reasons.get(name, 'Piston has no such field')}")

    def _left(self, fields: dict[str, Any], where: str) -> None:
        for name, value in fields.items():
            if value is not None:
                self.notes.append(f"{where}: {name}={_text(value)} is not carried")


STATES = ("state", "joint_position", "gripper_position")


def _text(value: Any) -> str:
    """The value as it stood in the file, cut to a line."""
    if isinstance(value, Call):
        inner = [*map(_text, value.args), *(f"{k}={_text(v)}" for k, v in value.keywords.items())]
        text = f"{value.name}({', '.join(inner)})"
    else:
        text = value.text if isinstance(value, Unread) else value if isinstance(value, str) else repr(value)
    return " ".join(text.split())[:200]


def _first_dict(value: Any) -> dict[str, Any] | None:
    """The first dictionary in a call's arguments, flattened with "/" as openpi's RepackTransform does."""
    if isinstance(value, dict):
        return dict(_flat(value, ""))
    if isinstance(value, Call):
        inner: tuple[Any, ...] = (*value.args, *value.keywords.values())
    else:
        inner = value if isinstance(value, tuple) else ()
    return next((found for item in inner if (found := _first_dict(item)) is not None), None)


def _flat(value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{path}{key}/")
        else:
            yield f"{path}{key}", inner


def _cameras(columns: dict[str, Any]) -> dict[str, str]:
    """Model slots by the words in the policies' image keys; the first of each slot."""
    cameras: dict[str, str] = {}
    for key, column in columns.items():
        if isinstance(column, str) and ("image" in key or "cam_" in key):
            slot = CAMERAS[(2 if "right" in key else 1) if "wrist" in key else 0]
            cameras.setdefault(slot, column)
    return cameras


def _known(robot: RobotConfig) -> RobotConfig:
    """A robot of Piston's that is the same but for its name, or this one."""
    return next((known for known in ROBOTS.values() if replace(robot, name=known.name) == known), robot)


# --- LeRobot: train_config.json --------------------------------------------------------------------------------------


def _lerobot(path: Path) -> Migrated:
    content = read_json(path)
    policy = content.get("policy")
    kind = policy.get("type") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or kind not in ("pi0", "pi05"):
        raise ValueError(
            f"{path} has policy type {kind!r}, expected pi0 or pi05 in LeRobot's train_config.json: Piston trains these"
        )
    notes: list[str] = []
    model, robot = _lerobot_model(policy, notes), _lerobot_robot(policy, notes)
    mapping = policy.get("normalization_mapping") or {}
    modes = {str(mapping.get(key, "QUANTILES" if kind == "pi05" else "MEAN_STD")) for key in ("STATE", "ACTION")}
    if modes not in ({"QUANTILES"}, {"MEAN_STD"}):
        notes.append(f"normalisation is {sorted(modes)}; Piston has QUANTILES or MEAN_STD for both: check it")
    dataset = content.get("dataset") or {}
    if isinstance(dataset.get("image_transforms"), dict) and dataset["image_transforms"].get("enable"):
        notes.append("LeRobot's image transforms are not carried; Piston's --data.augment are openpi's")
    data = DataConfig(
        root=Path(dataset["root"]) if dataset.get("root") else None,
        repo_id=dataset.get("repo_id") or "local",
        robot=robot,
        use_quantile_norm=modes == {"QUANTILES"},
        augment=False,
        num_workers=int(content.get("num_workers", 4)),
    )
    steps = int(content.get("steps", 100_000))
    freq, output = int(content.get("save_freq", 20_000)), content.get("output_dir")
    start = policy.get("pretrained_path")
    local = start if start and Path(start).exists() else None
    if start and local is None:
        notes.append(f"LeRobot starts from {start}: download it and give it with --train.init")
    wandb = content.get("wandb") or {}
    train = TrainConfig(
        exp_name=Path(output).name if output else content.get("job_name") or "run",
        batch_size=int(content.get("batch_size", 8)),
        num_train_steps=steps,
        seed=int(content.get("seed") or 42),
        log_interval=int(content.get("log_freq", 200)),
        save_interval=freq,
        keep_period=freq,  # LeRobot keeps every checkpoint
        init=None if local is None else Path(local),
        wandb=bool(wandb.get("enable", False)),
        project_name=wandb.get("project") or "piston",
    )
    notes += [
        "LeRobot's batch_size is of one process; Piston's is of all of them: multiply it by the number of processes",
        "LeRobot keeps no EMA and does not augment: both are off here; openpi's recipes have them on",
        "LeRobot normalises with statistics of single frames; compute Piston's with `piston data stats`",
    ]
    if content.get("peft"):
        notes.append("LeRobot's peft adapters are of another kind than openpi's LoRA: not carried")
    name = str(content.get("job_name") or kind)
    optim = _lerobot_optim(content, policy, steps, notes)
    return Migrated(RunConfig(name, model, data, optim, train), notes)


def _lerobot_model(policy: dict[str, Any], notes: list[str]) -> ModelConfig:
    pi05 = policy["type"] == "pi05"
    experts = {}
    for theirs, ours, default in (
        ("paligemma_variant", "paligemma", "gemma_2b"), ("action_expert_variant", "action_expert", "gemma_300m"),
    ):  # fmt: skip
        variant = policy.get(theirs, default)
        if variant not in GEMMA_VARIANTS:
            raise ValueError(f"policy.{theirs} is {variant!r}, expected one of {', '.join(GEMMA_VARIANTS)}: correct it")
        experts[ours] = GEMMA_VARIANTS[variant]
    frozen: tuple[Any, ...] = ("vision", "vlm") if policy.get("train_expert_only") else ()
    if policy.get("freeze_vision_encoder") and not frozen:
        frozen = ("vision",)
    if frozen:
        notes.append("what is frozen is bfloat16 in Piston, as in openpi")
    resolution = policy.get("image_resolution") or (224, 224)
    height, width = (int(n) for n in resolution)
    left = ("rtc_config", "empty_cameras")
    notes.extend(f"policy.{name} is not carried" for name in left if policy.get(name))
    return ModelConfig(
        pi05=pi05,
        dtype="float32" if policy.get("dtype", "float32") == "float32" else "bfloat16",
        image_size=(height, width),
        action_dim=int(policy.get("max_action_dim", 32)),
        action_horizon=int(policy.get("chunk_size", 50)),
        max_token_len=int(policy.get("tokenizer_max_length", 200 if pi05 else 48)),
        discrete_state_input=pi05,
        freeze=frozen,
        **experts,
    )


def _lerobot_robot(policy: dict[str, Any], notes: list[str]) -> RobotConfig:
    inputs, outputs = policy.get("input_features") or {}, policy.get("output_features") or {}
    images = [key for key, feature in inputs.items() if feature.get("type") == "VISUAL"]
    if not images or "observation.state" not in inputs or "action" not in outputs:
        raise ValueError(
            f"policy.input_features has {sorted(inputs)} and output_features {sorted(outputs)}; expected cameras, "
            "observation.state and action: use the train_config.json that LeRobot writes into a checkpoint"
        )
    if len(images) > len(CAMERAS):
        notes.append(f"only the first three cameras are carried, not {images[len(CAMERAS) :]}")
    cameras: dict[str, str] = dict(zip(CAMERAS, images, strict=False))
    notes.append(f"cameras took the model's slots in LeRobot's order: {cameras}; check which one is on a wrist")
    action_dim = int(outputs["action"]["shape"][0])
    mask: tuple[int, ...] = ()
    if policy.get("use_relative_actions"):
        names, apart = policy.get("action_feature_names"), tuple(policy.get("relative_exclude_joints") or ())
        if names and len(names) == action_dim:
            mask = tuple(-1 if any(word in joint for word in apart) else 1 for joint in names)
        else:
            notes.append("use_relative_actions is on, but the joints' names are not in the file: set delta_mask")
    return generic(
        name=str(policy["type"]) + "_robot",
        cameras=cameras,
        state_dim=int(inputs["observation.state"]["shape"][0]),
        action_dim=action_dim,
        delta_mask=mask,
    )


def _lerobot_optim(content: dict[str, Any], policy: dict[str, Any], steps: int, notes: list[str]) -> OptimConfig:
    """LeRobot's own optimizer and schedule, or the policy's preset where those are not set."""
    optimizer, schedule = content.get("optimizer") or {}, content.get("scheduler") or {}
    betas = optimizer.get("betas") or policy.get("optimizer_betas") or (0.9, 0.95)
    peak = float(schedule.get("peak_lr") or optimizer.get("lr") or policy.get("optimizer_lr", 2.5e-5))
    warmup = int(schedule.get("num_warmup_steps", policy.get("scheduler_warmup_steps", 1000)))
    decay = int(schedule.get("num_decay_steps", policy.get("scheduler_decay_steps", 30_000)))
    if steps < decay:  # LeRobot shortens both then
        warmup, decay = int(warmup * steps / decay), steps
        notes.append(f"LeRobot shortens the schedule to {steps} steps: written here as it runs, warm-up {warmup}")
    kinds = (str(optimizer.get("type", "adamw")), str(schedule.get("type", "cosine_decay_with_warmup")))
    if kinds != ("adamw", "cosine_decay_with_warmup"):
        notes.append(f"optimizer and schedule are {kinds}; Piston's AdamW with a cosine is set: check it")
    notes.append("LeRobot's cosine counts its decay from the first step, openpi's and Piston's from the end of warm-up")
    return OptimConfig(
        warmup_steps=warmup,
        peak_lr=peak,
        decay_steps=max(decay, warmup + 1),
        decay_lr=float(schedule.get("decay_lr", policy.get("scheduler_decay_lr", 2.5e-6))),
        b1=float(betas[0]),
        b2=float(betas[1]),
        eps=float(optimizer.get("eps", policy.get("optimizer_eps", 1e-8))),
        weight_decay=float(optimizer.get("weight_decay", policy.get("optimizer_weight_decay", 0.01))),
        clip_gradient_norm=float(optimizer.get("grad_clip_norm", policy.get("optimizer_grad_clip_norm", 1.0))),
        ema_decay=None,
    )


# --- the recipe file -------------------------------------------------------------------------------------------------

CLASSES = ("DataConfig", "GEMMA_VARIANTS", "ModelConfig", "OptimConfig", "RobotConfig", "RunConfig", "TrainConfig")


def source_of(migrated: Migrated, origin: str) -> str:
    """A Python file that sets RECIPE; only what differs from the defaults is written out."""
    body = _written(migrated.run, "")
    imports = [f"from piston.config.schema import {', '.join(n for n in CLASSES if n in body)}"]
    if "ROBOTS[" in body:
        imports.insert(0, "from piston.config.robots import ROBOTS")
    if "Path(" in body:
        imports = ["from pathlib import Path", "", *imports]
    lines = [f"Written by `piston migrate` from {origin}. To look at:", *(f"- {note}" for note in migrated.notes)]
    heading = "".join(f"# {' '.join(line.split())}\n" for line in lines) + "\n"  # one line each: never code
    return heading + "\n".join(imports) + f"\n\nRECIPE = {body}\n"


def _written(value: Any, indent: str) -> str:
    for table, known in (("GEMMA_VARIANTS", GEMMA_VARIANTS), ("ROBOTS", ROBOTS)):
        for name, entry in known.items():
            if value == entry:
                return f'{table}["{name}"]'
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return f"Path({str(value)!r})" if isinstance(value, Path) else repr(value)
    inner = indent + "    "
    lines = [
        f"{inner}{f.name}={_written(getattr(value, f.name), inner)},\n"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != _default(f)
    ]
    return f"{type(value).__name__}(\n{''.join(lines)}{indent})" if lines else f"{type(value).__name__}()"


def _default(f: Any) -> Any:
    make: Callable[[], Any] | Any = f.default_factory
    return f.default if make is dataclasses.MISSING else make()


def migrate_command(path: Path, name: str | None, out: Path | None, console: Console) -> int:
    """Writes the recipe file, reads it back, and prints what to look at."""
    migrated = migrate(path, name)
    target = out or Path(f"{Path(migrated.run.name).name}.py")
    if target.suffix != ".py" or target.exists():
        raise ValueError(
            f"cannot write {target}: it {'exists' if target.exists() else 'does not end with .py'}; expected a new "
            "Python file, nothing is ever overwritten: choose another with --out"
        )
    partial = target.with_name(f".{target.name}.tmp.py")
    try:
        partial.write_text(source_of(migrated, path.name))
        assert recipe(str(partial)) == migrated.run, "the written recipe is not what was read"
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    run = migrated.run
    kind = "π0.5" if run.model.pi05 else "π0"
    console.print(
        f"written: {target}: {run.name}, {kind}, horizon {run.model.action_horizon}, robot {run.data.robot.name}, "
        f"batch {run.train.batch_size}, {run.train.num_train_steps} steps",
        highlight=False,
        soft_wrap=True,
    )
    for note in migrated.notes:
        console.print(f"  look at: {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"then: piston train {target} --help", highlight=False, soft_wrap=True)
    return 0
