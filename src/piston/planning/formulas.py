"""The arithmetic of the plan. The page runs these very functions: `javascript.py` translates this file.

So only the Python that both languages share: assignments, if, for over range, arithmetic, comparisons, indexing,
and min, max, ceil, floor, len. Every value is a number, a list or a string-keyed dict. Units: bytes, seconds, FLOP/s.
"""

from math import ceil, floor

DAY = 86400


def quadratic(k, c, t, h):
    """A cost of one sample at c cameras, t text tokens, horizon h; `k` from `coefficients.py` (stored doubled)."""
    squares = k["cc"] * c * c + k["tt"] * t * t + k["hh"] * h * h
    products = k["ct"] * c * t + k["ch"] * c * h + k["th"] * t * h
    return (k["1"] + k["c"] * c + k["t"] * t + k["h"] * h + squares + products) / 2


def executed_flops(flops, s):
    """FLOPs of one sample with what checkpointing computes again: `share` of the blocks is checkpointed."""
    forward = quadratic(flops["forward"], s["cameras"], s["text"], s["horizon"])
    backward = quadratic(flops["backward"], s["cameras"], s["text"], s["horizon"])
    again = quadratic(flops["recompute"], s["cameras"], s["text"], s["horizon"])
    return forward + backward + again * s["share"]


def wall_seconds(batch, slope, overhead):
    """Two-term step time: linear in the node's batch, and a fixed part."""
    return slope * batch + overhead


def frames_per_second(batch, slope, overhead):
    """Samples per second of one node; tends to 1/slope."""
    return batch / (slope * batch + overhead)


def linear_memory(fixed, slope, samples):
    """Two-term memory of one GPU."""
    return fixed + slope * samples


def largest_linear_batch(capacity, fixed, slope):
    """Samples per GPU that two-term memory leaves room for."""
    return max(0, floor((capacity - fixed) / slope))


def timesteps(steps, batch):
    """Observation frames that training sees."""
    return steps * batch


def steps_for(frames, batch):
    return ceil(frames / batch)


def episodes(frames, frames_per_episode):
    return frames / frames_per_episode


def hours(frames, fps):
    return frames / fps / 3600


def days(frames, per_second):
    return frames / per_second / DAY


def state(s):
    """Bytes of weights, moments, EMA and gradients on one GPU; `*_shards` GPUs hold one copy between them.

    `optimised` parameters have moments, `trained` ones also a gradient: a dead weight has moments and none.
    """
    weights = 4 * s["parameters"] / s["weight_shards"]
    moments = 8 * s["optimised"] / s["optimizer_shards"]
    average = s["ema"] * 4 * s["parameters"] / s["optimizer_shards"]
    gradients = s["gradients"] * 4 * s["trained"] / s["gradient_shards"]
    return {"weights": weights, "moments": moments, "ema": average, "gradients": gradients}


def kept(unit, s):
    """Bytes that one block keeps from forward to backward, weights casts included."""
    inputs = quadratic(unit["inputs"], s["cameras"], s["text"], s["horizon"]) * s["samples"]
    whole = quadratic(unit["saved"], s["cameras"], s["text"], s["horizon"]) * s["samples"] + unit["casts"] * s["casts"]
    share = s["share"] * unit["block"]
    return inputs * share + whole * (1 - share)


def memory(units, s):
    """Peak of one GPU through a step: forward keeps, backward frees block by block while gradients grow.

    `units` in forward order. Returns bytes: the parts of the state, what forward keeps, the peak of each phase.
    """
    parts = state(s)
    images = 4 * s["sample_bytes"] * s["cameras"] * s["samples"]  # float32, alive through the step
    fixed = parts["weights"] + parts["moments"] + parts["ema"] + images
    whole_gather = s["single_unit"] * s["compute_bytes"] * s["parameters"]
    keeps = 0
    forward = 0
    for i in range(len(units)):
        work = quadratic(units[i]["workspace"], s["cameras"], s["text"], s["horizon"]) * s["samples"]
        keeps = keeps + units[i]["count"] * kept(units[i], s)
        forward = max(forward, fixed + keeps + whole_gather + work)
    forward_end = fixed + keeps + whole_gather
    remaining = keeps
    done = 0
    backward = 0
    for i in range(len(units)):
        unit = units[len(units) - 1 - i]
        one = kept(unit, s)
        share = s["share"] * unit["block"]
        saved = quadratic(unit["saved"], s["cameras"], s["text"], s["horizon"]) * s["samples"]
        again = (saved + unit["casts"] * s["casts"]) * ceil(share) * (1 - unit["fused"])
        work = quadratic(unit["workspace"], s["cameras"], s["text"], s["horizon"]) * s["samples"]
        gather = 2 * s["block_units"] * s["compute_bytes"] * unit["parameters"]
        grows = s["gradients"] * 4 * unit["trained"] / s["gradient_shards"]
        if s["single_unit"] > 0:
            grows = s["compute_bytes"] * unit["trained"]
        reduced = (4 + s["compute_bytes"]) * s["block_units"] * unit["trained"]
        busy = again + work + gather + reduced + 4 * unit["trained"] / s["gradient_shards"]
        backward = max(backward, fixed + whole_gather + remaining + done + busy)
        remaining = remaining - unit["count"] * one
        done = done + unit["count"] * grows
        backward = max(backward, fixed + whole_gather + remaining + one + done + again + work + gather + reduced)
    update = fixed + done + s["buckets"] * 4 * s["trained"]
    if s["single_unit"] > 0:
        update = fixed + done + 4 * s["trained"] + 4 * s["trained"] / s["gradient_shards"]
    backward = max(backward + s["buckets"] * 4 * s["trained"], update)
    return {
        "weights": parts["weights"], "moments": parts["moments"], "ema": parts["ema"],
        "gradients": parts["gradients"], "images": images, "saved": keeps, "forward_end": forward_end,
        "forward": forward,
        "backward": backward, "update": update, "peak": max(forward, backward),
    }  # fmt: skip


def peak_at(units, s, samples):
    """Peak bytes with `samples` on the GPU."""
    s["samples"] = samples
    return memory(units, s)["peak"]


def largest_batch(units, s, room, limit):
    """Most samples per GPU, up to `limit`, whose peak stays within `room` bytes; 0 if not even one fits."""
    low = 0
    high = limit + 1
    for _ in range(40):
        if high - low > 1:
            middle = floor((low + high) / 2)
            if peak_at(units, s, middle) <= room:
                low = middle
            else:
                high = middle
    return low


def update_bytes(s):
    """Bytes that AdamW moves on one GPU: four reads and three writes of float32; the EMA's one of each."""
    return s["trained"] * (28 + 8 * s["ema"]) / s["optimizer_shards"]


def ring_seconds(bytes_each, members, per_second):
    """All-reduce of `bytes_each` in a ring: each member sends and receives 2·(n−1)/n of it."""
    return 2 * (members - 1) / members * bytes_each / per_second


def inter_node_seconds(s):
    """All-reduce between nodes: each GPU carries its 1/gpus of the gradients over its own network port."""
    if s["nodes"] < 2:
        return 0
    return ring_seconds(4 * s["trained"] / s["gpus"], s["nodes"], s["network"])


def step_seconds(flops, s):
    """One step, by stage. Data loading and the copy to the device run behind it; the network partly does.

    `hfu`: share of the datasheet peak that a node's executed FLOPs reach, its own communication included.
    """
    node_batch = s["batch"] / s["nodes"]
    compute = node_batch * executed_flops(flops, s) / (s["gpus"] * s["peak"] * s["hfu"])
    network = inter_node_seconds(s)
    exposed = network * (1 - s["overlap"])
    copy = node_batch / s["gpus"] * s["sample_bytes"] * s["cameras"] / s["pcie"]
    data = 0
    if s["decode"] > 0:
        data = node_batch * s["cameras"] / s["decode"]
    on_device = compute + s["overhead"] + exposed
    return {
        "compute": compute, "overhead": s["overhead"], "network": network, "exposed": exposed, "copy": copy,
        "data": data, "step": max(on_device, data, copy),
    }  # fmt: skip


def configure(base, u, gpu):
    """Choices `u` on a machine `gpu` as the settings that the functions above read; `base`: the model's numbers."""
    world = u["gpus"] * u["nodes"]
    weights = 1
    moments = 1
    sharded = 0
    if u["sharding"] == "zero1":
        moments = world
    if u["sharding"] == "fsdp":
        weights = world
        sharded = 1
    if u["sharding"] == "hsdp":
        weights = u["gpus"]
        sharded = 1
    share = 0
    if u["checkpointing"] == "half":
        share = 0.5
    if u["checkpointing"] == "full":
        share = 1
    single = 0
    if u["unit"] == "single":
        single = sharded
    buckets = 0
    if u["sharding"] == "ddp":
        buckets = 1
    compute_bytes = 4
    if u["precision"] == "bfloat16":
        compute_bytes = 2
    capacity = gpu["memory"] * 1e9
    if u["usable"] > 0:
        capacity = u["usable"] * 1e9
    network = gpu["network"]
    if u["network"] > 0:
        network = u["network"]
    return {
        "batch": u["batch"], "gpus": u["gpus"], "nodes": u["nodes"], "cameras": u["cameras"], "text": u["text"],
        "horizon": u["horizon"], "share": share, "precision": u["precision"] + " " + u["kernels"],
        "compute_bytes": compute_bytes, "parameters": base["parameters"], "trained": base["trained"],
        "optimised": base["optimised"], "ema": u["ema"],
        "gradients": u["gradients"], "peak": gpu[u["precision"]] * 1e12, "hfu": u["hfu"], "overhead": u["overhead"],
        "overlap": u["overlap"], "network": max(network, 1e-9) * 1e9, "pcie": gpu["pcie"] * 1e9,
        "sample_bytes": base["sample_bytes"], "decode": u["decode"], "capacity": capacity, "slack": u["slack"] * 1e9,
        "price": u["price"], "frames": u["frames"], "samples": u["batch"] / world, "weight_shards": weights,
        "gradient_shards": weights, "optimizer_shards": max(weights, moments), "single_unit": single,
        "block_units": sharded - single, "buckets": buckets, "casts": 1 - sharded,
    }  # fmt: skip


def node_rate(flops, s):
    """Samples per second of one node at its share of the batch, without any network between nodes."""
    batch = s["batch"]
    nodes = s["nodes"]
    s["batch"] = batch / nodes
    s["nodes"] = 1
    rate = s["batch"] / step_seconds(flops, s)["step"]
    s["batch"] = batch
    s["nodes"] = nodes
    return rate


def days_on(rate, frames, nodes, share):
    """Days on `nodes` nodes that each keep their batch, at `share` of linear."""
    linear = 1
    if nodes > 1:
        linear = share
    return days(frames, rate * nodes * linear)


def evaluate(p, s):
    """All that the sliders move. `p`: FLOPs and units by precision; `s`: settings. See `plan.settings`."""
    stages = step_seconds(p["flops"], s)
    s["samples"] = s["batch"] / (s["gpus"] * s["nodes"])
    units = p["units"][s["precision"]]
    bytes_used = memory(units, s)
    room = s["capacity"] - s["slack"]
    largest = largest_batch(units, s, room, 4096)
    s["samples"] = s["batch"] / (s["gpus"] * s["nodes"])
    rate = s["batch"] / stages["step"]
    wall = days(s["frames"], rate)
    gpu_hours = wall * 24 * s["gpus"] * s["nodes"]
    return {
        "stages": stages, "memory": bytes_used, "largest": largest, "rate": rate, "days": wall,
        "gpu_hours": gpu_hours, "cost": gpu_hours * s["price"], "steps": ceil(s["frames"] / s["batch"]),
        "model_flops": executed_flops(p["flops"], s),
    }  # fmt: skip
