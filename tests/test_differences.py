"""The catalogue of differences: where ports of openpi left its JAX code, and our side of each.

docs/differences.md names the ports and says which test pins which row. A test here has the right way and the mistake:
ours meets the reference within a tolerance, the mistake misses it by far more, on the smallest input that shows it.
"""

import ast
import dataclasses
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from piston.batch import AugmentDraws, Observation
from piston.config.recipes import recipe, recipe_names
from piston.config.robots import LIBERO, generic
from piston.config.schema import (
    CAMERAS,
    GemmaConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    SiglipConfig,
)
from piston.data.augment import augment, crop_and_rotate, to_unit_range
from piston.data.draws import draw
from piston.data.norm import KeyStats, normalize, unnormalize
from piston.data.order import rows_of
from piston.data.prompt import discretize_state
from piston.data.resize import fitted_size, pillow_resize_with_pad
from piston.data.stats import RunningStats, compute_norm_stats
from piston.data.transforms import input_transform
from piston.model import gemma, siglip
from piston.model.attention import attend, rope_angles, rotate
from piston.model.flow import flow_loss
from piston.model.init import initialise
from piston.model.layers import gelu
from piston.model.pi0 import Pi0, time_embedding
from piston.train.optim import Optimizer, learning_rate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "differences.md"
GOLDEN = ROOT / "tests" / "golden"


@cache
def recorded(name: str) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    return dict(np.load(GOLDEN / f"{name}.npz"))


def other_bits(ours: Tensor, reference: np.ndarray) -> float:
    """Share of entries that are not the reference's to the bit."""
    return float((ours.detach().float().numpy() != reference).mean())


def off(ours: Tensor | np.ndarray, reference: Tensor | np.ndarray) -> float:
    """Largest absolute difference."""
    a, b = (
        x.detach().double().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float64) for x in (ours, reference)
    )
    return float(np.abs(a - b).max())


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


# --- the page ----------------------------------------------------------------------------------------------------


def rows_of_the_page() -> list[list[str]]:
    """The cells of every row of every table with a column "pinned by", which is the last."""
    rows: list[list[str]] = []
    columns = 0
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            columns = 0
        elif cells[-1] == "pinned by":
            columns = len(cells)
        elif columns and set(line) - set("|-: "):
            assert len(cells) == columns, line
            rows.append(cells)
    return rows


def named_in(cell: str) -> list[tuple[Path, str]]:
    """`name` is a test of this file, `path::name` one of tests/path."""
    found = []
    for word in re.findall(r"`([^`]+)`", cell):
        path, _, name = word.rpartition("::")
        found.append((ROOT / "tests" / path if path else Path(__file__), name))
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    functions = ast.parse(path.read_text()).body
    return frozenset(f.name for f in functions if isinstance(f, ast.FunctionDef) and f.name.startswith("test_"))


def test_every_row_of_the_page_has_its_tests() -> None:
    rows = rows_of_the_page()
    assert len(rows) >= 60
    without = [row[0] for row in rows if not named_in(row[-1])]
    assert without == []
    named = [test for row in rows for test in named_in(row[-1])]
    lost = sorted({f"{path.relative_to(ROOT)}::{name}" for path, name in named if name not in names_in(path)})
    assert lost == []


def test_every_test_of_the_catalogue_is_on_the_page() -> None:
    named = {name for row in rows_of_the_page() for path, name in named_in(row[-1]) if path == Path(__file__)}
    assert {name for name in names_in(Path(__file__)) - named if "_the_page" not in name} == set()


# --- data and statistics -----------------------------------------------------------------------------------------


def test_every_epoch_has_an_order_of_its_own() -> None:
    epochs = rows_of(42, np.arange(4 * 60), 60).reshape(4, 60)
    assert all(np.array_equal(np.sort(epoch), np.arange(60)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    sampler = DistributedSampler(range(60), num_replicas=2, rank=0, seed=0)  # pyright: ignore[reportArgumentType]
    assert list(sampler) == list(sampler), "the mistake: set_epoch is never called"


def test_a_step_holds_the_same_samples_at_every_world_size() -> None:
    batch, steps, size = 8, 20, 60
    whole = [set(rows_of(42, np.arange(s * batch, (s + 1) * batch), size)) for s in range(steps)]

    def distributed(world: int, rank_batch: int) -> list[set[int]]:
        """The mistake: a sampler per rank that hands out strided shares, and a batch size per rank."""
        ranks = [list(DistributedSampler(range(size), world, r, seed=42)) for r in range(world)]  # pyright: ignore
        return [{row for r in ranks for row in r[s * rank_batch : (s + 1) * rank_batch]} for s in range(3)]

    for world in (1, 2, 4):
        share = batch // world
        for s, expected in enumerate(whole):
            ranks = [rows_of(42, np.arange(share) + s * batch + r * share, size) for r in range(world)]
            assert set(np.concatenate(ranks)) == expected
    assert distributed(1, batch) != distributed(2, batch)


def test_every_sample_on_every_rank_has_its_own_noise() -> None:
    draws = [draw(42, number, horizon=2, action_dim=3) for number in range(64)]
    assert len({d.noise.tobytes() for d in draws}) == len({float(d.time) for d in draws}) == 64
    ranks = [np.random.default_rng(42).standard_normal((16, 6)) for _ in range(4)]  # the mistake: the run's seed
    assert len({row.tobytes() for rank in ranks for row in rank}) == 16


class Ramp:
    """Two episodes of 9 and 3 frames; actions climb ten times faster than the state."""

    num_frames, episode_starts, episode_index = 12, np.array([0, 9, 12]), np.array([0, 1])

    def column(self, key: str) -> np.ndarray:
        state = np.arange(12, dtype=np.float32)[:, None].repeat(2, axis=1)
        return state if key == "observation.state" else state * 10


def test_statistics_are_of_delta_chunks_not_of_single_frames() -> None:
    robot = generic(cameras={"base_0_rgb": "top"}, state_dim=2, action_dim=2, delta_mask=(2,))
    run = recipe("debug_pi05")
    run = dataclasses.replace(
        run, model=dataclasses.replace(run.model, action_horizon=4), data=dataclasses.replace(run.data, robot=robot)
    )
    ours = compute_norm_stats(Ramp(), run, batch_size=2)["actions"].mean[0]  # pyright: ignore[reportArgumentType]
    ends = [9] * 9 + [12] * 3
    chunks = [[10 * min(row + k, ends[row] - 1) - row for k in range(4)] for row in range(12)]
    assert ours == pytest.approx(np.mean(chunks), rel=1e-6)
    per_frame = np.mean([chunk[0] for chunk in chunks])
    absolute = np.mean([10 * row for row in range(12)])
    assert min(abs(ours - per_frame), abs(ours - absolute)) > 1.0


def test_quantiles_are_of_all_frames_not_extremes_of_episodes() -> None:
    episodes = np.random.default_rng(0).normal(size=(10, 500, 1)).astype(np.float32)
    running = RunningStats()
    for episode in episodes:
        running.update(episode)
    q01, q99 = running.statistics().quantiles()
    exact = np.quantile(episodes, (0.01, 0.99))
    of_episodes = np.quantile(episodes[..., 0], (0.01, 0.99), axis=1)
    wide = of_episodes[0].min(), of_episodes[1].max()
    assert max(abs(q01[0] - exact[0]), abs(q99[0] - exact[1])) < 0.03
    assert min(abs(wide[0] - exact[0]), abs(wide[1] - exact[1])) > 0.1


STATS = KeyStats(
    mean=np.array([0.3, -0.2]), std=np.array([1e-5, 0.5]), q01=np.array([0.3, -1.0]), q99=np.array([0.3 + 1e-5, 1.5])
)
X = np.array([0.30002, 0.7])
Q01, Q99 = STATS.quantiles()
IN_FLOAT32 = KeyStats(*(array.astype("f4") for array in (STATS.mean, STATS.std, Q01, Q99)))
WITHOUT_EPSILON: dict[str, Callable[[], np.ndarray]] = {
    "quantile, no epsilon unless the range is zero": lambda: (X - Q01) / (Q99 - Q01) * 2 - 1,
    "quantile, float32 throughout": lambda: normalize(X.astype("f4"), IN_FLOAT32, use_quantiles=True),
    "z-score, epsilon 1e-8": lambda: (X - STATS.mean) / (STATS.std + 1e-8),
}


@pytest.mark.parametrize("mistake", WITHOUT_EPSILON)
def test_normalisation_has_its_epsilon_and_its_float64(mistake: str) -> None:
    quantile = mistake.startswith("quantile")
    exact = [2e-5 / 1.1e-5 * 2 - 1, 1.7 / 2.500001 * 2 - 1] if quantile else [2e-5 / 1.1e-5, 0.9 / 0.500001]
    ours = normalize(X, STATS, use_quantiles=quantile)
    assert off(ours, np.array(exact)) < 1e-9
    assert off(WITHOUT_EPSILON[mistake](), np.array(exact)) > 3e-3
    back = unnormalize(ours, STATS, use_quantiles=quantile)
    assert off(back, X) < 1e-15
    if not quantile:
        assert off(ours * STATS.std + STATS.mean, X) > 1e-7, "the mistake: no epsilon on the way out"


def test_the_resize_is_pillows_and_antialiased() -> None:
    arrays = recorded("preprocess_resize")
    case = next(name.split("/")[0] for name in arrays if name.startswith("100x300_to_2"))
    image, expected = arrays[f"{case}/in_uint8"], arrays[f"{case}/pil_uint8"]
    height, width = expected.shape[:2]
    assert np.array_equal(pillow_resize_with_pad(image, height, width), expected)
    size = fitted_size(image.shape[:2], (height, width))
    plain = F.interpolate(torch.from_numpy(image).permute(2, 0, 1)[None].float(), size=size, mode="bilinear")[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    inner = expected[top : top + size[0], left : left + size[1]]
    assert np.abs(plain.permute(1, 2, 0).numpy() - inner).mean() > 0.5, "of 255"


class Words:
    """A tokenizer that keeps the texts it was given."""

    vocab_size, bos_id = 1000, 2

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [3] * len(text)


def prompt_text(*, state_in_prompt: bool) -> str:
    run = recipe("debug_pi05")
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model, image_size=(14, 14), action_horizon=1, discrete_state_input=state_in_prompt
        ),
        data=dataclasses.replace(run.data, robot=LIBERO, use_quantile_norm=False),
    )
    words = Words()
    sample = {
        "images": {slot: np.zeros((14, 14, 3), np.uint8) for slot in LIBERO.cameras},
        "state": np.linspace(-0.9, 0.9, 8, dtype=np.float32),
        "prompt": " pick_up the\nCup ",
    }
    input_transform(run, None, words)(sample)
    return words.texts[0]


def test_prompts_are_cleaned_and_hold_the_unpadded_state_where_the_recipe_says() -> None:
    assert prompt_text(state_in_prompt=False).strip() == "pick up the Cup"
    text = prompt_text(state_in_prompt=True)
    assert text.startswith("Task: pick up the Cup, State: ")
    bins = text.split("State: ")[1].split(";")[0].split()
    assert bins == [str(b) for b in discretize_state(np.linspace(-0.9, 0.9, 8, dtype=np.float32))]
    assert not recipe("pi05_libero").model.discrete_state_input
    assert recipe("pi05_droid_finetune").model.discrete_state_input


def test_a_prompt_length_that_was_asked_for_is_kept() -> None:
    assert ModelConfig(pi05=True, max_token_len=48).max_token_len == 48


def test_recipes_are_openpis_in_batch_rate_average_and_decay() -> None:
    run = recipe("pi05_libero")
    assert (run.model.action_horizon, run.train.batch_size, run.optim.ema_decay) == (10, 256, 0.999)
    assert (run.optim.peak_lr, run.optim.decay_lr, run.model.dtype) == (5e-5, 5e-5, "bfloat16")
    for name in recipe_names():
        assert recipe(name).optim.weight_decay == 1e-10
        assert recipe(name).data.augment


# --- augmentation ------------------------------------------------------------------------------------------------


def augmented(camera: str = "base_0_rgb", **changes: Callable[[Tensor], Tensor]) -> tuple[Tensor, np.ndarray]:
    """Piston's result with the reference's draws, some of them changed, and the reference's result."""
    arrays, case = recorded("preprocess_augment"), "a"
    images = to_unit_range(torch.from_numpy(arrays[f"{case}/in_u8/{camera}"]))[:, None]
    names = {"theta": "theta_rad", "jitter": "jitter_applied"}
    drawn: dict[str, Tensor] = {}
    for field in AugmentDraws.__dataclass_fields__:
        name = f"{case}/params/{camera}/{names.get(field, field)}"
        shape = (len(images), 2) if field == "crop_center_yx" else (len(images),)
        drawn[field] = torch.from_numpy(arrays.get(name, np.zeros(shape, np.float32)))[:, None]
    draws = AugmentDraws(**{field: changes.get(field, lambda t: t)(value) for field, value in drawn.items()})
    return augment(images, draws, (camera,))[:, 0], arrays[f"{case}/out/{camera}"]


def test_augmentation_equals_augmax_with_its_draws() -> None:
    for camera in CAMERAS:
        assert off(*augmented(camera)) < 2e-5, camera


def first_for_all(draws: Tensor) -> Tensor:
    return draws[:1].expand_as(draws)


def test_augmentation_is_drawn_for_each_sample() -> None:
    drawn = [draw(42, number, horizon=1, action_dim=1, cameras=CAMERAS).cameras for number in range(16)]
    assert len({float(d.theta[0]) for d in drawn if d}) == len({float(d.hue[0]) for d in drawn if d}) == 16
    for field in ("theta", "crop_center_yx", "hue", "brightness", "contrast"):
        shared: dict[str, Callable[[Tensor], Tensor]] = {field: first_for_all}
        assert off(*augmented("base_0_rgb", **shared)) > 0.05, f"the mistake: one {field} a batch"


def test_colours_are_jittered_half_the_time() -> None:
    applied = recorded("preprocess_augment")["a/params/base_0_rgb/jitter_applied"]
    assert 0 < applied.mean() < 1
    assert off(*augmented(jitter=torch.ones_like)) > 0.05, "the mistake: always"


def test_hue_is_shifted() -> None:
    assert off(*augmented(hue=torch.zeros_like)) > 0.05


def test_saturation_is_left_alone() -> None:
    """augmax draws a saturation and does not use it."""
    right, reference = augmented()
    arrays = recorded("preprocess_augment")
    factor = 1 + torch.from_numpy(arrays["a/params/base_0_rgb/saturation_ignored"])[:, None, None, None]
    applied = torch.from_numpy(arrays["a/params/base_0_rgb/jitter_applied"])[:, None, None, None]
    unit = right / 2 + 0.5
    value = unit.amax(-1, keepdim=True)
    saturated = (value - (value - unit) * factor) * 2 - 1  # HSV saturation times the factor
    assert off(torch.where(applied, saturated, right), reference) > 0.05


def test_brightness_and_contrast_bend_the_hsv_value() -> None:
    """The mistake: torchvision's way, RGB times a factor, and contrast about the mean grey."""
    plain, reference = augmented(brightness=torch.zeros_like, contrast=torch.zeros_like)
    arrays = recorded("preprocess_augment")
    brightness, contrast = (
        torch.from_numpy(arrays[f"a/params/base_0_rgb/{name}"])[:, None, None, None]
        for name in ("brightness", "contrast")
    )
    applied = torch.from_numpy(arrays["a/params/base_0_rgb/jitter_applied"])[:, None, None, None]
    unit = (plain / 2 + 0.5) * (1 + brightness)
    grey = unit.mean((1, 2, 3), keepdim=True)
    unit = ((unit - grey) * (1 + contrast) + grey).clamp(0, 1)
    assert off(torch.where(applied, unit * 2 - 1, plain), reference) > 0.05


def test_crop_resize_and_rotation_are_one_resampling() -> None:
    arrays = recorded("preprocess_augment")
    images = to_unit_range(torch.from_numpy(arrays["a/in_u8/base_0_rgb"])) / 2 + 0.5
    center, theta = (
        torch.from_numpy(arrays[f"a/params/base_0_rgb/{name}"]) for name in ("crop_center_yx", "theta_rad")
    )
    expected = arrays["a/after_geometric_01/base_0_rgb"]
    assert off(crop_and_rotate(images, center, theta), expected) < 1e-6
    twice = crop_and_rotate(crop_and_rotate(images, center, torch.zeros_like(theta)), torch.zeros_like(center), theta)
    whole = crop_and_rotate(images, center.round(), theta)
    assert off(twice, expected) > 0.02, "the mistake: resampled twice"
    assert off(whole, expected) > 0.02, "the mistake: crops at whole pixels"


def test_wrist_cameras_get_equal_draws_and_no_geometry() -> None:
    drawn = [draw(42, n, horizon=1, action_dim=1, cameras=CAMERAS).cameras for n in range(20)]
    for cameras in drawn:
        assert cameras is not None
        assert cameras.hue[1] == cameras.hue[2] != cameras.hue[0]
        assert not cameras.theta[1:].any()
        assert cameras.theta[0]
    arrays = recorded("preprocess_augment")
    for name in ("hue", "brightness", "contrast", "jitter_applied"):
        left, right = (arrays[f"a/params/{side}_wrist_0_rgb/{name}"] for side in ("left", "right"))
        assert np.array_equal(left, right), "as the reference drew"


# --- the model's arithmetic --------------------------------------------------------------------------------------

SMALL = GemmaConfig(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)


def small(**changes: object) -> ModelConfig:
    config = ModelConfig(
        pi05=True,
        paligemma=SMALL,
        action_expert=SMALL,
        siglip=SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2),
        vocab_size=32,
        image_size=(14, 14),
        cameras=("base_0_rgb",),
        action_dim=8,
        action_horizon=3,
        max_token_len=4,
    )
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


def observation(config: ModelConfig, batch: int = 2) -> Observation:
    return Observation(
        images=normal(batch, 1, *config.image_size, 3).clamp(-1, 1),
        image_masks=torch.ones(batch, 1, dtype=torch.bool),
        state=normal(batch, config.action_dim, seed=1),
        tokenized_prompt=torch.arange(batch * 4, dtype=torch.int32).view(batch, 4),
        tokenized_prompt_mask=torch.tensor([[True] * 4, [True, True, False, False]])[:batch],
    )


def drawn_model(config: ModelConfig) -> Pi0:
    """Every parameter drawn, also those that start at zero."""
    model = Pi0(config)
    for i, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=i, std=0.2)
    return model


def small_loss(model: Pi0, time: Tensor | None = None) -> dict[str, Tensor]:
    config, tap = model.config, {}
    chunk = (2, config.action_horizon, config.action_dim)
    time = torch.tensor([0.7003, 0.3001]) if time is None else time
    flow_loss(model, observation(config), normal(*chunk, seed=2), normal(*chunk, seed=3), time, tap)
    return tap


def test_weights_gradients_and_moments_are_float32_whatever_computes() -> None:
    model = drawn_model(small(dtype="bfloat16"))
    small_loss(model)["loss"].backward()
    optimizer = Optimizer(dict(model.named_parameters()), OptimConfig())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == optimizer.m[name].dtype == optimizer.v[name].dtype == torch.float32, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
    assert optimizer.update().dtype == torch.float32


@pytest.mark.parametrize(("rate", "unmoved"), [(2.5e-5, 0.70), (5e-5, 0.43)])
def test_a_step_moves_float32_weights_and_not_bfloat16_ones(rate: float, unmoved: float) -> None:
    """Adam's first steps have the size of the learning rate: half a bfloat16 ulp, or less, for most weights."""
    weights = normal(100_000, std=0.02)
    parameter = weights.clone().requires_grad_()
    parameter.grad = normal(100_000, seed=1)
    Optimizer({"w": parameter}, OptimConfig(warmup_steps=0, peak_lr=rate, clip_gradient_norm=1e9)).update()
    assert float((parameter == weights).float().mean()) < 0.001
    stored = weights.bfloat16()
    stepped = stored.float() + (parameter.detach() - weights)
    assert float((stepped.bfloat16() == stored).float().mean()) == pytest.approx(unmoved, abs=0.02)


def test_bfloat16_moments_stall() -> None:
    """A constant gradient of 1: the moments must reach 1; in bfloat16 their last steps are too small to be kept."""
    p = torch.zeros(1).requires_grad_()
    optimizer = Optimizer({"p": p}, OptimConfig(clip_gradient_norm=10.0))
    m, v = torch.zeros(2, 1, dtype=torch.bfloat16)
    for _ in range(400):
        p.grad = torch.ones(1)
        optimizer.update()
        m, v = (m.float() * 0.9 + 0.1).bfloat16(), (v.float() * 0.95 + 0.05).bfloat16()
    assert abs(optimizer.m["p"].item() - 1) + abs(optimizer.v["p"].item() - 1) < 1e-5
    assert 1 - v.item() > 0.02


def rope_in(dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    arrays = recorded("units")
    x = torch.from_numpy(arrays["rope/h256/x"]).bfloat16()
    cos, sin = (t.to(dtype) for t in rope_angles(torch.from_numpy(arrays["rope/h256/positions"]), 256))
    if dtype == torch.float32:
        return rotate(x, cos, sin), arrays["rope/h256/y_bfloat16"]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1), arrays["rope/h256/y_bfloat16"]


def test_rotary_embedding_is_computed_in_float32() -> None:
    assert other_bits(*rope_in(torch.float32)) < 0.005
    assert other_bits(*rope_in(torch.bfloat16)) > 0.2


def test_logits_and_softmax_are_float32() -> None:
    """Values are unit vectors, so the result is the probabilities: logits of 64 and more round by 0.25 in bfloat16."""
    q, k = (normal(1, 64, 1, 64, seed=seed, std=2.0).bfloat16() for seed in (0, 1))
    v, mask = torch.eye(64)[None, :, None].bfloat16(), torch.ones(1, 64, 64, dtype=torch.bool)
    logits = torch.einsum("bnqe,bmqe->bqnm", q.double(), k.double())
    exact = logits.softmax(-1)[:, 0]
    ours, rounded = attend(q, k, v, mask)[:, :, 0], logits.bfloat16().softmax(-1)[:, 0]
    assert off(ours, exact) < 3e-3  # half an ulp of a probability near 1
    assert off(rounded, exact) > 10 * off(ours, exact)


def test_siglip_divides_queries_by_the_rounded_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """√72 is 8.5 in bfloat16, 0.17 % too large; in float32 it is √72."""
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return v

    monkeypatch.setattr(siglip, "unmasked_attention", spy)
    block = siglip.SiglipBlock(SiglipConfig(width=72, depth=1, mlp_dim=8, num_heads=1))
    for i, parameter in enumerate(block.parameters()):
        parameter.data = normal(*parameter.shape, seed=i, std=0.3)
    x = normal(1, 8, 72)
    for dtype, divisor in ((torch.bfloat16, 8.5), (torch.float32, math.sqrt(72))):
        block(x.to(dtype))
        query = block.q(block.norm_attn(x.to(dtype)))
        assert torch.equal(seen[-1].flatten(-2), query / divisor)
    exact = block.q(block.norm_attn(x.bfloat16())) * 72**-0.5
    assert other_bits(seen[0].flatten(-2), exact.detach().float().numpy()) > 0.2
    assert 8.5 / math.sqrt(72) - 1 == pytest.approx(0.00173, abs=1e-5)


def test_layer_norm_takes_its_variance_in_one_pass() -> None:
    """E[x²] − E[x]² of values far from zero loses digits; the reference does so, and its results show it."""
    arrays = recorded("units")
    x = torch.from_numpy(arrays["norm/offset/x"])
    ours, two_pass = siglip.LayerNorm(64), nn.LayerNorm(64, eps=1e-6)
    for layer in (ours, two_pass):
        layer.weight.data, layer.bias.data = (torch.from_numpy(arrays[f"norm/ln_{n}"]) for n in ("scale", "bias"))
    reference = arrays["norm/offset/ln_float32"]
    assert off(ours(x), reference) < 2e-6 * np.abs(reference).max()
    assert off(two_pass(x), reference) > 10 * off(ours(x), reference)
    assert other_bits(ours(x.bfloat16()), arrays["norm/offset/ln_bfloat16"]) < 0.01


def test_gelu_is_the_tanh_form() -> None:
    arrays = recorded("units")
    x, reference = torch.from_numpy(arrays["act/x"]), arrays["act/gelu"]
    assert off(gelu(x), reference) < 2e-6
    assert 4e-4 < off(F.gelu(x), reference) < 5e-4


def test_gelu_in_bfloat16_is_rounded_operation_by_operation() -> None:
    arrays = recorded("units")
    x, reference = torch.from_numpy(arrays["act/x"]).bfloat16(), arrays["act/gelu_bfloat16"]
    assert other_bits(gelu(x), reference) < 0.01
    assert other_bits(F.gelu(x.float(), approximate="tanh").bfloat16(), reference) > 0.1


def ada(dtype: torch.dtype) -> tuple[gemma.AdaRMSNorm, Tensor, Tensor]:
    arrays = recorded("units")
    norm = gemma.AdaRMSNorm(64)
    norm.modulation.weight = nn.Parameter(torch.from_numpy(arrays["norm/ada_kernel"]).T.contiguous())
    norm.modulation.bias = nn.Parameter(torch.from_numpy(arrays["norm/ada_bias"]))
    return norm, torch.from_numpy(arrays["norm/unit/x"]).to(dtype), torch.from_numpy(arrays["norm/cond"])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_adaptive_norm_makes_scale_then_shift_then_gate(order: tuple[int, int, int]) -> None:
    norm, x, cond = ada(torch.float32)
    reference = [recorded("units")[f"norm/unit/{name}_float32"] for name in ("ada", "ada_gate")]
    for parameter in (norm.modulation.weight, norm.modulation.bias):
        assert parameter is not None
        parameter.data = torch.cat([parameter.data.chunk(3)[i] for i in order])
    error = sum(off(ours, theirs) for ours, theirs in zip(norm(x, cond), reference, strict=True))
    assert (error < 1e-5) if order == (0, 1, 2) else (error > 0.1)


def test_adaptive_modulation_is_rounded_to_the_compute_dtype() -> None:
    norm, x, cond = ada(torch.bfloat16)
    reference = recorded("units")["norm/unit/ada_bfloat16"]
    scale, shift, _ = norm.modulation(cond)[:, None].chunk(3, dim=-1)
    in_float32 = (gemma._unit_rms(x) * (1 + scale) + shift).bfloat16()
    assert other_bits(norm(x, cond)[0], reference) < 0.02
    assert other_bits(in_float32, reference) > 0.1


def test_time_embedding_is_float32_in_the_references_order() -> None:
    arrays = recorded("units")
    time, reference = torch.from_numpy(arrays["posemb/time"]), arrays["posemb/dim1024"]
    assert off(time_embedding(time, 1024), reference) < 1e-6
    period = 0.004 * 1000.0 ** np.linspace(0, 1, 512)
    angle = arrays["posemb/time"].astype(np.float64)[:, None] / period * 2 * np.pi
    in_float64 = np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)
    assert 5e-5 < off(in_float64, reference) < 5e-4, "the mistake: float64, then float32"
    assert off(time_embedding(time.bfloat16().float(), 1024), reference) > 1.0, "the mistake: time in bfloat16"


def test_text_is_scaled_once_and_rounded_after() -> None:
    one = GemmaConfig(width=2048, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8)
    model = gemma.Gemma(one, dataclasses.replace(one, width=8), 16, adaptive=False, dtype=torch.bfloat16)
    model.embedding.data = normal(16, 2048, std=0.01)
    exact = (model.embedding.double() * math.sqrt(2048)).float().bfloat16().float().detach().numpy()
    ours = model.embed(torch.arange(16, dtype=torch.int32)[None])[0]
    assert other_bits(ours, exact) < 0.001
    twice_rounded = model.embedding.detach().bfloat16() * torch.tensor(math.sqrt(2048)).bfloat16()
    assert other_bits(twice_rounded, exact) > 0.2


def test_matrix_products_of_float32_runs_are_float32() -> None:
    import piston.train.loop

    assert piston.train.loop
    assert torch.get_float32_matmul_precision() == "highest"


def test_noise_time_target_and_loss_stay_float32() -> None:
    tap = small_loss(drawn_model(small(dtype="bfloat16")))
    for name in ("x_t", "u_t", "v_t", "time_posemb", "loss_per_element", "loss_chunk", "loss"):
        assert tap[name].dtype == torch.float32, name
    assert torch.equal(tap["u_t"], normal(2, 3, 8, seed=3) - normal(2, 3, 8, seed=2))
    time = torch.linspace(0.001, 1, 1000)
    assert 1.9e-3 < off(time.bfloat16(), time) <= 1.96e-3, "half the shortest period of the embedding"


def test_the_loss_is_the_mean_over_padded_dimensions_too() -> None:
    model, real = drawn_model(small()), 5
    tap = small_loss(model)
    assert torch.equal(tap["loss_chunk"], tap["loss_per_element"].mean(-1))
    weight = model.action_out_proj.weight
    (ours,) = torch.autograd.grad(tap["loss"], weight, retain_graph=True)
    (real_only,) = torch.autograd.grad(tap["loss_per_element"][..., :real].mean(), weight)
    assert bool(ours[real:].any(-1).all()), "padded outputs are trained towards noise − 0"
    assert not real_only[real:].any(), "the mistake: they are not"
    assert off(real_only[:real], ours[:real] * 8 / real) < 1e-4, "and the others weigh more before the clip"


# --- initial values ----------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """One parameter under a dotted name."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        first, _, rest = name.partition(".")
        if rest:
            self.add_module(first, Holder(rest, shape))
        else:
            self.register_parameter(first, nn.Parameter(torch.empty(shape)))


VLM, IMG = "PaliGemma/llm/layers", "PaliGemma/img/Transformer/encoderblock"
INITIAL = {
    "linear weights": ("gemma.blocks.0.prefix.q.weight", (1024, 2048), f"{VLM}/attn/q_einsum/w"),
    "linear weights of the expert": ("gemma.blocks.0.suffix.q.weight", (1024, 1024), f"{VLM}/attn/q_einsum_1/w"),
    "down projection": ("gemma.blocks.0.suffix.down.weight", (256, 4096), f"{VLM}/mlp_1/linear"),
    "text embedding": ("gemma.embedding", (512, 2048), "PaliGemma/llm/embedder/input_embedding"),
    "action projection": ("action_in_proj.weight", (1024, 32), "action_in_proj/kernel"),
    "action projection's bias": ("action_in_proj.bias", (1024,), "action_in_proj/bias"),
    "state projection": ("state_proj.weight", (1024, 32), "state_proj/kernel"),
    "RMSNorm scale": ("gemma.blocks.0.prefix.attn_norm.scale", (2048,), f"{VLM}/pre_attention_norm/scale"),
    "adaptive norm": (
        "gemma.blocks.0.suffix.attn_norm.modulation.weight", (3072, 1024), f"{VLM}/pre_attention_norm_1/Dense_0/kernel",
    ),
    "SigLIP attention": (
        "siglip.blocks.0.q.weight", (1152, 1152), f"{IMG}/MultiHeadDotProductAttention_0/query/kernel",
    ),
    "SigLIP MLP bias": ("siglip.blocks.0.fc1.bias", (4304,), f"{IMG}/MlpBlock_0/Dense_0/bias"),
    "SigLIP patches": ("siglip.patch_embed.weight", (1152, 588), "PaliGemma/img/embedding/kernel"),
    "SigLIP positions": ("siglip.pos_embedding", (256, 1152), "PaliGemma/img/pos_embedding"),
    "SigLIP head": ("siglip.head.weight", (2048, 1152), "PaliGemma/img/head/kernel"),
    "LoRA A": ("gemma.blocks.0.prefix.q.lora.a", (8, 2048, 16), f"{VLM}/attn/q_einsum/lora_a"),
    "LoRA B": ("gemma.blocks.0.prefix.q.lora.b", (8, 16, 256), f"{VLM}/attn/q_einsum/lora_b"),
}  # fmt: skip
# What ports start with instead: Hugging Face's N(0, 0.02²) for everything, torch's default, LoRA's zeros.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "action projection": lambda p: p.uniform_(-(32**-0.5), 32**-0.5),
    "action projection's bias": lambda p: p.uniform_(-(32**-0.5), 32**-0.5),
    "state projection": lambda p: p.uniform_(-(32**-0.5), 32**-0.5),
    "RMSNorm scale": lambda p: p.fill_(1.0),
    "LoRA B": lambda p: p.zero_(),
}


def misfit(values: Tensor, entry: dict[str, float]) -> float:
    """How far a sample is from the recorded distribution, in units of what chance allows; below 1 is a fit."""
    values, std = values.detach().double(), entry["std"]
    if std == 0:
        return float((values - entry["mean"]).abs().max()) * 1e12
    chance = 8 / values.numel() ** 0.5 + 1e-3
    misfits = [abs(values.mean().item() - entry["mean"]) / (std * chance), abs(values.std().item() / std - 1) / chance]
    kurtosis = ((values - values.mean()) ** 4).mean().item() / values.var().item() ** 2 if values.any() else math.inf
    return max(*misfits, abs(kurtosis - entry["kurtosis"]) / (60 / values.numel() ** 0.5 + 0.02))


@pytest.mark.parametrize("what", INITIAL)
def test_initial_values_are_distributed_as_the_references(what: str) -> None:
    name, shape, path = INITIAL[what]
    files = [json.loads((GOLDEN / f"init_stats_{f}.json").read_text())["params"] for f in ("pi05", "pi0", "lora")]
    entry = next(f[path] for f in files if path in f)
    model = Holder(name, shape)
    initialise(model, seed=7)
    (parameter,) = model.parameters()
    assert misfit(parameter, entry) < 1
    with torch.no_grad():
        WRONG.get(what, lambda p: p.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0)))(parameter)
    assert misfit(parameter, entry) > 1


def test_no_row_of_the_text_embedding_is_zero() -> None:
    model = Holder("gemma.embedding", (8, 64))
    initialise(model, seed=7)
    (embedding,) = model.parameters()
    assert embedding.any(-1).all()  # the mistake: row 0, the padding, zeroed


# --- LoRA --------------------------------------------------------------------------------------------------------


def test_lora_is_scaled_on_attention_and_not_on_the_ffn() -> None:
    lora = LoraConfig(4, 8.0)
    expert = gemma.Expert(dataclasses.replace(SMALL, lora_attn=lora, lora_ffn=lora), adaptive=False)
    for i, parameter in enumerate(expert.parameters()):
        parameter.data = normal(*parameter.shape, seed=i, std=0.3)
    x = normal(2, 3, 16)
    for projection, scaling in ((expert.q, 2.0), (expert.gate_up, 1.0)):
        adapter = projection.lora
        assert adapter is not None
        by_hand = torch.cat([x @ a @ b for a, b in zip(adapter.a, adapter.b, strict=True)], -1)  # pyright: ignore
        plain = x @ projection.weight.T
        assert off(projection(x), plain + scaling * by_hand) < 1e-4
        assert off(projection(x), plain + (3.0 - scaling) * by_hand) > 0.1
    assert LoraConfig(4, 8.0, rslora=True).scaling == 4.0


# --- optimiser ---------------------------------------------------------------------------------------------------


def test_the_clip_has_no_epsilon() -> None:
    gradient = torch.tensor([3e-4, 4e-4])
    ours, theirs = torch.zeros(2).requires_grad_(), torch.zeros(2).requires_grad_()
    optimizer = Optimizer({"p": ours}, OptimConfig(clip_gradient_norm=1e-4))
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    assert float(optimizer.update()) == pytest.approx(5e-4)
    torch.nn.utils.clip_grad_norm_([theirs], 1e-4)
    clipped = optimizer.m["p"] / 0.1
    assert off(clipped / (gradient / 5), torch.ones(2)) < 1e-6
    assert off(theirs.grad / (gradient / 5), torch.ones(2)) > 1e-3


def test_the_first_update_has_a_rate_and_the_cosine_starts_after_the_warm_up() -> None:
    config = OptimConfig()
    recorded_rates = dict(zip(recorded("schedule")["steps"].tolist(), recorded("schedule")["lr"].tolist(), strict=True))
    assert learning_rate(config, 0) == pytest.approx(recorded_rates[0]) == pytest.approx(2.5e-5 / 1001)
    middle = max(step for step in recorded_rates if step <= 15_000)
    assert learning_rate(config, middle) == pytest.approx(recorded_rates[middle], rel=1e-6)
    from_zero = 2.5e-6 + (2.5e-5 - 2.5e-6) * 0.5 * (1 + math.cos(math.pi * middle / 30_000))
    assert from_zero / recorded_rates[middle] < 0.97, "the mistake: a cosine that counts the warm-up"


def test_weight_decay_is_as_good_as_none() -> None:
    p = torch.ones(1).requires_grad_()
    optimizer = Optimizer({"p": p}, OptimConfig(warmup_steps=0, peak_lr=1e-3))
    for _ in range(100):
        p.grad = torch.zeros(1)
        optimizer.update()
    assert p.item() == 1.0
    assert (1 - 1e-3 * 0.01) ** 100 < 0.9991, "the mistake: 0.01"


def test_the_average_follows_every_update_from_the_first() -> None:
    p = torch.zeros(1).requires_grad_()
    optimizer = Optimizer({"p": p}, OptimConfig(warmup_steps=0, peak_lr=0.1, ema_decay=0.9))
    by_hand, late = 0.0, 0.0
    for step in range(5):
        p.grad = torch.ones(1)
        optimizer.update()
        by_hand = 0.9 * by_hand + 0.1 * p.item()
        late = p.item() if step == 0 else 0.9 * late + 0.1 * p.item()
    assert optimizer.ema is not None
    assert optimizer.ema["p"].item() == pytest.approx(by_hand, rel=1e-5)
    assert min(abs(late - by_hand), abs(p.item() - by_hand)) > 0.01
