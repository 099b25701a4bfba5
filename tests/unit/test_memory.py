"""Layers computed again, kept on the host or tiled: the same gradients, less kept. One process, no GPU.

With FSDP2 on four ranks they run in tests/recipes/test_strategy.py.
"""

import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssConfig, SeedOssMLP

from ringflash import huggingface
from ringflash.huggingface.weights import draw_weights
from ringflash.lightning.module import empty_model
from ringflash.memory import Memory, layers, save_memory, tiles
from ringflash_kernels import reference
from tests.helpers.recipe_model import build_model
from tests.unit.test_flops import CONFIG

SEQLEN, LAYERS = 48, CONFIG["num_hidden_layers"]
CHECKPOINTING = ("none", "attention_kept", "full")
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
    "deepseek_v3": {  # an MLP besides the experts, and in the first layer only an MLP
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


def config(family: str) -> dict[str, Any]:
    return {**CONFIG, "model_type": family, "max_position_embeddings": 256, **EXPERTS.get(family, {})}


def model_with(memory: Memory, family: str = "llama", dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same parameters every time."""
    model = build_model(config(family), None, memory=memory, dtype=dtype)
    if dtype == torch.float64 and family in EXPERTS:
        model.get_submodule("model").set_experts_implementation("eager")  # type: ignore[operator]
    return model


def batch() -> dict[str, Any]:
    """Three packed documents."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 1, 20, SEQLEN], dtype=torch.int32)
    return huggingface.prepare_batch(torch.randint(0, 64, (1, SEQLEN)), group=None, cu_seqlens=bounds)


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    loss = model(**batch())
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], within: float = 1e-12) -> None:
    """Every value to so much of the largest."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= within * value.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_are_those_without(family: str) -> None:
    """Each choice by itself and all together; 7 divides no length, 1000 is more than there are."""
    want = step(model_with(Memory(), family))
    for checkpointing, offload, tile in itertools.product(CHECKPOINTING, (False, True), (0, 7, 1000)):
        if checkpointing == "none" and offload:
            continue
        assert_same(step(model_with(Memory(checkpointing, offload, tile), family)), want)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_tiles_have_the_same_gradients(family: str) -> None:
    """Gradients of each token's weights, too, by which routers learn; DeepSeek's routers compute in fp32, to that."""
    want = step(model_with(Memory(), family))
    for memory in (Memory(mlp_tile_tokens=7), Memory("attention_kept", mlp_tile_tokens=1)):
        model = model_with(memory, family)
        got = step(model)
        tiled = [type(module).__name__ for module in model.modules() if hasattr(module, "tile_tokens")]
        assert sum("Experts" in name or "Moe" in name for name in tiled) == LAYERS - (family == "deepseek_v3")
        assert_same(got, want, 1e-6 if family == "deepseek_v3" else 1e-12)


def test_tiled_experts_keep_no_tensor_of_their_width() -> None:
    """Each token is there twice: what it is, both products, the halves' product, and the result before its weight."""
    everything, tiled = (kept_bytes(m, "qwen3_moe", torch.float32) for m in (Memory(), Memory(mlp_tile_tokens=8)))
    assert everything - tiled >= LAYERS * SEQLEN * 2 * (32 + 4 * 24 + 32) * 4


def test_experts_of_batches_and_frozen_routers() -> None:
    """Tokens of several sequences are in one row; weights that need no gradient get none."""
    plain, tiled = (
        model_with(m, "qwen3_moe").get_submodule("model.model.layers.0.mlp.experts")
        for m in (Memory(), Memory("none", mlp_tile_tokens=5))
    )
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    index, weights = torch.randint(0, 4, (18, 2)), torch.rand(18, 2).double()
    out = tiled(x.requires_grad_(), index, weights)
    want = plain(x.detach().flatten(0, 1), index, weights)
    assert out.shape == x.shape and torch.allclose(out.flatten(0, 1), want, rtol=1e-12, atol=0)
    out.sum().backward()
    want.sum().backward()
    assert torch.allclose(tiled.down_proj.grad, plain.down_proj.grad, rtol=1e-12, atol=1e-14)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, and notes their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.dtypes = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
            self.dtypes.add(out.dtype)
        return out


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_layer_computed_again_leaves_its_tiles_out(family: str) -> None:
    """They are computed again by themselves: as many products as without them, of an MLP all but the last again."""
    flops = []
    for memory in (Memory("attention_kept"), Memory("attention_kept", mlp_tile_tokens=8)):
        with Products() as products:
            step(model_with(memory, family))
        flops.append(products.flops)
    assert flops[1] == flops[0]


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "more after it": lambda forward: lambda x: 2 * forward(x),
    "more in its place": lambda forward: lambda x: forward(x).square_(),
    "it again": lambda forward: lambda x: forward(forward(x)),
}


@pytest.mark.parametrize(
    ("change", "products"),
    [
        ("nothing", 2), ("a bias", 2), ("autocast", 2), ("a hook", 3), ("more after it", 4), ("more in its place", 4),
        ("it again", 8),
    ],
)  # fmt: skip
def test_last_product_is_left_out_if_unneeded(change: str, products: int) -> None:
    """The last of three that a tile computes again. A hook sees it; what follows it is found by trying, once."""
    mlps = [
        model_with(memory, dtype=torch.float32 if change == "autocast" else torch.float64).get_submodule(
            "model.model.layers.0.mlp"
        )
        for memory in (Memory(), Memory(mlp_tile_tokens=20))
    ]
    seen: list[bool] = []
    for mlp in mlps:
        last: Any = mlp.get_submodule("down_proj")
        if change == "a bias":
            last.bias = nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64))
        if change == "a hook":
            last.register_forward_hook(lambda module, args, out: seen.append(bool(out.any())))
        if change in FOLLOWED:
            name = "whole" if hasattr(mlp, "whole") else "forward"
            setattr(mlp, name, FOLLOWED[change](getattr(mlp, name)))
    flops, outs = [], []
    for mlp in mlps:
        x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0)).to(mlp.get_parameter("gate_proj.weight"))
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            out = mlp(x.requires_grad_())
        with Products() as counted:
            out.double().square().sum().backward()
        assert counted.dtypes == {out.dtype}  # the backward computes again under the forward's autocast
        flops.append(counted.flops)
        outs.append(out)
    assert flops[1] - flops[0] == products * 2 * 40 * 32 * 80
    torch.testing.assert_close(*outs, rtol=0, atol=0 if change == "autocast" else 1e-12)
    for name, value in mlps[0].named_parameters():
        tolerance = 2**-7 if change == "autocast" else 1e-12
        assert (mlps[1].get_parameter(name).grad - value.grad).norm() <= tolerance * value.grad.norm()
    assert all(seen)


def test_tiles_refuse_sharded_or_parametrized_layers() -> None:
    """ZeRO-3; and LoRA on experts: the backward of a tile would run without it."""
    model = model_with(Memory(mlp_tile_tokens=8))
    next(model.get_submodule("model.model.layers.0.mlp").parameters()).ds_id = 0
    with pytest.raises(NotImplementedError, match="mlp_tile_tokens must be 0 under DeepSpeed's ZeRO-3"):
        model(**batch())
    model = model_with(Memory(mlp_tile_tokens=8), "qwen3_moe")
    experts = model.get_submodule("model.model.layers.0.mlp.experts")
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(NotImplementedError, match="must be its own, got parametrized ones .as by LoRA on experts"):
        model(**batch())


@pytest.mark.parametrize(
    ("checkpointing", "training", "times"),
    [("none", True, 1), ("attention_kept", True, 1), ("full", True, 2), ("full", False, 1)],
)
def test_attention_is_computed_again_only_when_asked(checkpointing: Any, training: bool, times: int) -> None:
    model = model_with(Memory(checkpointing)).train(training)
    with mock.patch.object(reference, "forward", wraps=reference.forward) as kernel:
        step(model)
    assert kernel.call_count == times * LAYERS


def kept_bytes(memory: Memory, family: str = "llama", dtype: torch.dtype = torch.float64) -> int:
    """Bytes that live between forward and backward, parameters not counted."""
    model = model_with(memory, family, dtype)
    inputs = batch()
    storages: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = model(**inputs)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert loss.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_checkpointing_and_tiles_keep_less() -> None:
    """The outer hooks see the layers' inputs with checkpointing, and with tiles no tensor of the MLP's width."""
    everything, tiled, inputs = (kept_bytes(m) for m in (Memory(), Memory(mlp_tile_tokens=8), Memory("full")))
    mlp = LAYERS * SEQLEN * 80 * 8  # one tensor of the MLP's width in each layer
    assert everything - tiled == 4 * mlp
    assert inputs < everything - 4 * mlp


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_tile_of_all_tokens_is_none_with_checkpoints(checkpointing: Any) -> None:
    model = model_with(Memory(checkpointing, mlp_tile_tokens=SEQLEN))
    with mock.patch.object(tiles._Tiles, "apply", side_effect=tiles._Tiles.apply) as tiled:
        step(model)
    assert tiled.call_count == (LAYERS if checkpointing == "none" else 0)


@pytest.mark.filterwarnings("error:A saved_tensors_hooks context")  # torch 2.15: attention's results bypass ours
@pytest.mark.parametrize("checkpointing", ["attention_kept", "full"])
def test_offloaded_inputs_leave_the_device(checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies standing in for the host's memory: the layers' inputs are copied, nothing else, and not kept."""
    copied: list[tuple[int, ...]] = []
    got: list[weakref.ref[torch.UntypedStorage]] = []

    def copy(x: torch.Tensor) -> torch.Tensor:
        if x.numel():  # torch 2.11's checkpoints keep an empty tensor, too
            copied.append(tuple(x.shape))
            got.append(weakref.ref(x.untyped_storage()))
        return x.clone()

    def on_host(*, pin_memory: bool) -> Any:
        assert not pin_memory  # they are on the CPU
        return torch.autograd.graph.saved_tensors_hooks(copy, lambda x: x)

    monkeypatch.setattr(layers, "save_on_cpu", on_host)
    loss = model_with(Memory(checkpointing, offload_checkpoints=True))(**batch())
    gc.collect()
    assert copied == [(1, SEQLEN, 32)] * LAYERS
    assert [storage() for storage in got] == [None] * LAYERS
    loss.backward()


def test_tiles_sum_gradients_in_fp32() -> None:
    """bf16, a tile for each token: the sum is that of the tiles' gradients in fp32, rounded once."""
    torch.manual_seed(0)
    model = model_with(Memory(mlp_tile_tokens=1), dtype=torch.bfloat16)
    mlp = model.get_submodule("model.model.layers.0.mlp")
    x, grad = torch.randn(2, 1, 40, 32, dtype=torch.bfloat16)
    mlp(x.requires_grad_()).backward(grad)
    total = torch.zeros_like(mlp.down_proj.weight, dtype=torch.float32)
    for i in range(40):
        (part,) = torch.autograd.grad(mlp.whole(x[:, i : i + 1]), mlp.down_proj.weight, grad[:, i : i + 1])
        total += part
    assert torch.equal(mlp.down_proj.weight.grad, total.bfloat16())


class Drawing(nn.Module):
    """A gated MLP that calls a function on its wide intermediate."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 80), nn.Linear(32, 80), nn.Linear(80, 32)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.noise(self.gate_proj(x) * self.up_proj(x)))


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=80)),
    "named": lambda: SeedOssMLP(SeedOssConfig(hidden_size=32, intermediate_size=80)),
    "called": lambda: Drawing(lambda x: nn.functional.dropout(x, 0.5)),
    "noise": lambda: Drawing(lambda x: x + torch.randn_like(x)),
    "layer": lambda: Drawing(nn.RReLU()),
}


@pytest.mark.parametrize(("kind", "compiled"), [*((kind, False) for kind in DRAWING), ("lora", True), ("noise", True)])
def test_tiles_draw_the_same_in_the_backward(kind: str, compiled: bool) -> None:
    """A tile's gradients have the forward's draws, whatever has drawn them, in a compiled model as well."""
    torch.manual_seed(0)
    mlp = nn.ModuleDict({"mlp": DRAWING[kind]().double()})
    tiles.tile_mlps(mlp, 8)
    mlp = mlp["mlp"]
    if kind == "lora":
        mlp.down_proj = nn.Sequential(nn.Dropout(0.5), mlp.down_proj)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    torch.manual_seed(0)
    out, state = (torch.compile(mlp) if compiled else mlp)(x), torch.get_rng_state()
    (got,) = torch.autograd.grad(out.square().sum(), mlp.gate_proj.weight)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    whole = torch.cat([mlp.whole(tile) for tile in x.split(8, dim=1)], dim=1)
    (want,) = torch.autograd.grad(whole.square().sum(), mlp.gate_proj.weight)
    assert torch.equal(out, whole) and (got - want).abs().max() <= 1e-12 * want.abs().max()


def test_tiles_see_weights_changed_before_the_backward() -> None:
    """Gradients of new weights are not those of the outputs; torch refuses them without tiles, too."""
    mlp = model_with(Memory(mlp_tile_tokens=5)).get_submodule("model.model.layers.0.mlp")
    out = mlp(torch.randn(1, 20, 32, dtype=torch.float64, requires_grad=True))
    with torch.no_grad():
        mlp.up_proj.weight += 1
    with pytest.raises(RuntimeError, match="weights of TiledLlamaMLP must not change between its forward and its"):
        out.sum().backward()


def test_tiles_refuse_second_derivatives() -> None:
    """They keep no graph of their gradients, also if the gradient of their output is a constant."""
    mlp = model_with(Memory(mlp_tile_tokens=5)).get_submodule("model.model.layers.0.mlp")
    x = torch.randn(1, 20, 32, dtype=torch.float64, requires_grad=True)
    for out in (mlp(x).sum(), mlp(x * x).square().sum()):
        with pytest.raises(NotImplementedError, match="create_graph must be False with mlp_tile_tokens, got True"):
            torch.autograd.grad(out, x, create_graph=True)


def test_a_frozen_projection_gets_no_gradient() -> None:
    """A hook gets the gradient of another one once, of all tiles."""
    model, plain = model_with(Memory("attention_kept", mlp_tile_tokens=7)), model_with(Memory())
    for m in (model, plain):
        m.get_submodule("model.model.layers.1.mlp").up_proj.weight.requires_grad_(False)
        m.get_submodule("model.model.layers.1.mlp").gate_proj.weight.register_hook(lambda grad: grad - 1)
        m(**batch()).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (name == "model.model.layers.1.mlp.up_proj.weight")
        assert p.grad is None or (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max()


def test_tiles_refuse_tensors_that_are_lent() -> None:
    """The backward computes a tile again, with the module's own parameters."""
    mlp = model_with(Memory(mlp_tile_tokens=5)).get_submodule("model.model.layers.0.mlp")
    lent = {name: 2 * p for name, p in mlp.named_parameters()}
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.functional_call, .*; use no tiles"):
        torch.func.functional_call(mlp, lent, x)
    with torch.no_grad():
        first, whole = (torch.func.functional_call(mlp, lent, y) for y in (x[:, :5], x))
        assert torch.equal(first, whole[:, :5])
    with pytest.raises(ValueError, match="MLPs must be tiled only once, got TiledLlamaMLP"):
        save_memory(mlp, Memory(mlp_tile_tokens=5))


def test_copies_and_names_stay_whole() -> None:
    model, plain = model_with(Memory("full", mlp_tile_tokens=7)), model_with(Memory())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_same(step(deepcopy(model)), step(plain))


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpointing must be 'attention_kept' or 'full' with offload_checkpoints"):
        model_with(Memory(offload_checkpoints=True))
    with pytest.raises(ValueError, match="checkpointing must be one of none, attention_kept, full, got 'all'"):
        model_with(Memory("all"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mlp_tile_tokens must be positive, got -1"):
        model_with(Memory(mlp_tile_tokens=-1))
    with pytest.raises(NotImplementedError, match="model must have MLPs with gate_proj"):
        save_memory(nn.Linear(2, 2), Memory(mlp_tile_tokens=8))
    with pytest.raises(NotImplementedError, match="GradientCheckpointingLayer, got none in Linear"):
        save_memory(nn.Linear(2, 2), Memory("full"))


def test_liger_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="liger must be False without a GPU"):
        model_with(Memory(liger=True))
    model_with(Memory(liger="auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(RuntimeError, match="liger-kernel must be installed for liger=True"):
        save_memory(nn.Module(), Memory(liger=True))
    with pytest.warns(UserWarning, match="liger 'auto' goes without Liger's kernels: liger-kernel must be installed"):
        save_memory(nn.Module(), Memory(liger="auto"))
    with pytest.raises(ValueError, match="liger must be true, false or 'auto', got 'yes'"):
        save_memory(nn.Module(), Memory(liger="yes"))  # type: ignore[arg-type]


def test_liger_replaces_layers_and_not_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package; its kernels do not run here."""
    calls = pretend_liger(monkeypatch, broken=lambda model: model.layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = nn.Module()
    model.config = types.SimpleNamespace(model_type="llama")
    for choice in (True, "auto"):
        save_memory(model, Memory(liger=choice))  # type: ignore[arg-type]
    assert calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})] * 2
    model.config.model_type = "broken"
    for choice in (True, "auto"):
        with pytest.raises(NotImplementedError, match="that Liger can patch, got AttributeError for Module: "):
            save_memory(model, Memory(liger=choice))  # type: ignore[arg-type]
    model.config.model_type = "unheard-of"
    with pytest.raises(NotImplementedError, match="model_type must be one that Liger knows, got 'unheard-of'"):
        save_memory(model, Memory(liger=True))


def test_liger_leaves_the_family_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows by them what to draw: with Liger's in their place experts kept what the memory held."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as family

    def apply(model: nn.Module) -> None:
        family.Qwen3MoeExperts = type("LigerExperts", (nn.Module,), {})
        family.apply_rotary_pos_emb = lambda *args, **_: rotate(*args)
        for layer in model.model.layers:
            layer.mlp.experts.forward = types.MethodType(type(layer.mlp.experts).forward, layer.mlp.experts)

    rotate, own = family.apply_rotary_pos_emb, family.Qwen3MoeExperts
    pretend_liger(monkeypatch, qwen3_moe=apply)
    monkeypatch.setattr(family, "apply_rotary_pos_emb", rotate)  # which undoes the patch at the end
    want = step(model_with(Memory(), "qwen3_moe"))
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda, "current_device", lambda: 0)
        model = empty_model(config("qwen3_moe"), None, Memory(liger=True))
    assert family.Qwen3MoeExperts is own and family.apply_rotary_pos_emb is not rotate
    draw_weights(model.model.double(), torch.device("cpu"), 0)
    model.get_submodule("model").set_experts_implementation("eager")  # type: ignore[operator]
    assert_same(step(model), want)


def pretend_liger(monkeypatch: pytest.MonkeyPatch, **others: Any) -> list[tuple[nn.Module, dict[str, bool]]]:
    """A package that only notes what it is asked to replace; of other families with what is given."""
    calls: list[tuple[nn.Module, dict[str, bool]]] = []

    def apply(cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, model: Any = None) -> None:
        losses = {"cross_entropy": cross_entropy, "fused_linear_cross_entropy": fused_linear_cross_entropy}
        calls.append((model, losses))

    fake = types.ModuleType("liger_kernel.transformers.monkey_patch")
    fake.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply, **others}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return calls
