"""Every production kernel compiles for sm_90a to the code it was designed to be. CPU.

What is compiled is what the launchers launch (variants.py). The last tests show that the checks can fail.
"""

import importlib.util
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ringflash_kernels.hopper import gather_scatter
from ringflash_kernels.hopper.backward import host, keys, queries
from ringflash_kernels.hopper.backward.tiles import QueryTiles, backward_tiles
from ringflash_kernels.hopper.environment import triton_release
from ringflash_kernels.hopper.forward import kernel
from ringflash_kernels.hopper.fp8 import backward as fp8_backward
from ringflash_kernels.hopper.fp8 import backward_keys as fp8_keys
from ringflash_kernels.hopper.launcher import Launcher
from tests.compile.compiler import Compiled, Launch, compile_launch
from tests.compile.known_spills import KNOWN_SPILLS
from tests.compile.report import compile_all
from tests.compile.sass import exp_within_turns, products_within_turns, share_of_exp_before_last_wait
from tests.compile.shared_memory import allocations, overlaps
from tests.compile.variants import (
    dq_launch,
    forward_launch,
    fp8_keys_launch,
    keys_launch,
    production_launches,
    publish_launch,
)

pytestmark = pytest.mark.timeout(900)

SHARED_MEMORY_LIMIT = 232_448  # bytes a thread block may use
LAUNCHES = production_launches()
RELEASE = triton_release()
FORWARD, BACKWARD = ([x for x in LAUNCHES if x.name.startswith(name)] for name in ("forward", "backward"))
ATTENTION = FORWARD + BACKWARD


def _name(launch: Launch) -> str:
    return f"{launch.name} {launch.variant}"


# One kernel for each path through the code, as `make test` compiles them; the others have the mark `every_kernel`.
OF_EACH_PATH = {
    "forward_kernel hd64 bfloat16 band", "forward_kernel hd64 bfloat16 bounds",
    "forward_kernel hd96 bfloat16 band", "forward_kernel hd128 bfloat16 bounds",
    "forward_kernel hd128 bfloat16 band resume fp32 out", "forward_kernel hd192 bfloat16 band",
    "forward_kernel hd256 bfloat16 band", "forward_kernel hd192/128 bfloat16 band",
    "forward_kernel hd128 bfloat16 ends window", "forward_fp8 hd256 ends resume fp32 out",
    "backward_keys hd128 bfloat16 ends window in parts", "backward_wide hd192 bfloat16 ends window",
    "backward_queries hd256 bfloat16 ends",
    "backward_keys hd64 bfloat16 band", "backward_keys hd96 bfloat16 band", "backward_keys hd128 bfloat16 bounds",
    "backward_keys hd128 bfloat16 band store", "backward_wide hd256 bfloat16 band",
    "backward_latent hd192/128 bfloat16 band", "backward_latent hd192/128 bfloat16 ends window",
    "backward_queries hd192 bfloat16 band", "backward_queries hd256 bfloat16 band second hop",
    "_preprocess hd128 bfloat16 band", "_postprocess hd128 bfloat16 band", "forward_fp8 hd64 band",
    "forward_fp8 hd128 bounds", "forward_fp8 hd128 band resume fp32 out", "forward_fp8 hd256 band",
    "backward_keys_fp8 hd64 fp8 band", "backward_keys_fp8 hd128 fp8_scores bounds",
    "backward_keys_fp8 hd128 fp8_scores band overwritten bfloat16", "backward_wide_fp8 hd256 fp8 band in parts",
    "backward_queries_fp8 hd256 fp8 bounds",
    "quantise_rows hd128 bfloat16", "quantise_rows hd128 bfloat16 dequantised", "quantise_records hd128 bfloat16",
    "quantise_records hd128 bfloat16 to the peers", "_statistics hd128 fp8_scores band",
    "_query_operands hd128 fp8 band", "_set_unit hd128 fp8 band", "_rescale hd64 fp8 band second hop",
    "_key_operands hd128 fp8 band", "_rotate_back hd128 fp8_scores band",
}  # fmt: skip
# A few more, which CI also compiles with the newest triton.
WITH_NEWEST_TRITON = {
    "forward_kernel hd128 bfloat16 band", "backward_keys hd128 bfloat16 band",
    "backward_keys hd128 bfloat16 band deterministic", "backward_wide hd192/128 bfloat16 band store deterministic",
    "backward_queries hd192/128 bfloat16 band deterministic", "backward_latent hd192/128 bfloat16 band store",
    "forward_fp8 hd128 band", "backward_keys_fp8 hd128 fp8 band",
    "_collect hd128 bfloat16 sum over ranks", "_publish hd128 bfloat16 to the peers",
}  # fmt: skip
assert {_name(x) for x in LAUNCHES} >= OF_EACH_PATH | WITH_NEWEST_TRITON
assert {x.name for x in LAUNCHES} == {name.split()[0] for name in OF_EACH_PATH | WITH_NEWEST_TRITON}


def _of(launches: list[Launch]):
    """One test for each kernel."""
    return pytest.mark.parametrize("launch", [pytest.param(x, id=_name(x), marks=_marks(x)) for x in launches])


def _marks(launch: Launch) -> list[pytest.MarkDecorator]:
    if _name(launch) in WITH_NEWEST_TRITON:
        return [pytest.mark.newest_triton]
    return [] if _name(launch) in OF_EACH_PATH else [pytest.mark.every_kernel]


class _Results:
    """Compiled kernels by launch, waited for when they are asked for."""

    def __init__(self, launches: list[Launch]) -> None:
        jobs = 1 if "PYTEST_XDIST_WORKER" in os.environ else None  # other files are tested at the same time
        self._stream = zip(launches, compile_all(launches, jobs), strict=True)
        self._ready: dict[str, Compiled] = {}

    def __getitem__(self, launch: Launch) -> Compiled:
        while launch.key not in self._ready:
            done, result = next(self._stream)
            self._ready[done.key] = result
        return self._ready[launch.key]


@pytest.fixture(scope="module")
def compiled(request) -> _Results:
    """Compile what the selected tests need."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    launches = {x.key: x for item in items if (x := item.callspec.params.get("launch"))}
    return _Results(list(launches.values()))


@_of(LAUNCHES)
def test_resources(launch, compiled):
    """Fits into shared memory; wgmma is asynchronous (ptxas warns C7510 to C7514 where it is not)."""
    result = compiled[launch]
    assert result.shared_bytes <= SHARED_MEMORY_LIMIT
    assert not result.warnings


@_of(ATTENTION)
def test_nothing_shares_its_place(launch, compiled):
    """Above all no mbarrier, which the hardware may still write to: see shared_memory.py."""
    found = allocations(compiled[launch].ttgir)
    assert len(found) >= 8 and found[-1].name == "ttg.warp_specialize", "buffers, barriers and captures"
    assert overlaps(found) == []


@_of(ATTENTION)
def test_hopper_instructions(launch, compiled):
    """Tensor cores, TMA loads, and in the backward TMA reductions wherever dQ, dK or dV is summed."""
    counts = compiled[launch].program.counts
    assert counts["QGMMA" if launch.name.endswith("fp8") else "HGMMA"] and counts["UTMALDG"]
    stored = {
        "backward_wide": "store" in launch.variant,
        "backward_wide_fp8": "overwritten" in launch.variant,
        "backward_queries": "second hop" not in launch.variant,
    }
    sums = launch in BACKWARD and not stored.get(launch.name)
    assert counts["UTMAREDG"] if sums else counts["UTMASTG"]


@_of([launch for launch in LAUNCHES if launch not in ATTENTION and launch.name != "_set_unit"])  # it reads scales
def test_tensors_pass_in_wide_pieces(launch, compiled):
    """Copies of 16 bytes: one element at a time takes nine times as long."""
    wide, single = _global_accesses(compiled[launch])
    assert wide and not single


def _global_accesses(result: Compiled) -> tuple[int, int]:
    """Count the accesses of 16 bytes, and those of one element in 16 bits."""
    wide, single = (len(re.findall(rf"\b(?:LDG|STG)\.E\.{width}\b", result.sass)) for width in ("128", "U16"))
    return wide, single


@_of([launch for launch in BACKWARD if "store" in launch.variant])
def test_stored_gradients_are_not_summed(launch, compiled):
    """dK and dV leave by TMA stores, also in fp32; those of dQ in the loop and after it are the only reductions."""
    counts, reductions = compiled[launch].program.counts, {"backward_wide": 0, "backward_latent": 8}
    assert counts["UTMASTG"] and counts["UTMAREDG"] <= reductions.get(launch.name, 4)


@_of([launch for launch in ATTENTION if launch.name.endswith("fp8")])
def test_no_constant_is_converted_to_e4m3(launch, compiled):
    """ptxas (12.8) leaves bytes of the result undefined: zeros and ones must be e4m3 from the start."""
    assert not _converted_zeros(compiled[launch])


def _converted_zeros(result: Compiled) -> list[str]:
    return re.findall(r"F2FP\S*\.E4M3\.\S* R\d+, RZ, RZ", result.sass)


@pytest.mark.skipif(RELEASE not in KNOWN_SPILLS, reason=f"no spills of triton {RELEASE} are recorded")
@_of(ATTENTION)
def test_no_spills_where_nothing_is_masked(launch, compiled):
    loops = compiled[launch].program.unmasked_loops
    assert len(loops) >= 2, "the main loop of each consumer"
    spills = max(loop.spills_off_the_mask for loop in loops)
    known = KNOWN_SPILLS[RELEASE].get(_name(launch), 0)
    assert spills <= known
    if spills:
        pytest.xfail(f"{spills} spill instructions of {known} known")


@_of([launch for launch in BACKWARD if launch.name == "backward_latent" and "band" in launch.variant])
def test_addresses_are_in_uniform_registers(launch, compiled):
    """With 48 R2UR a step, which ptxas makes of 3.9 by default, it is 5% slower."""
    assert max(loop.counts["R2UR"] for loop in compiled[launch].program.loops) <= 24


def _overlaps(launch: Launch) -> bool:
    """Return whether a consumer's softmax is meant to run under its own products."""
    found = [value.tiles for value in launch.constants.values() if hasattr(value, "tiles")]
    return any(tiles.schedule == "overlap" and not tiles.joint for tiles in found)


def _is_joint(launch: Launch) -> bool:
    """Return whether a forward is meant to issue S of a block and P V of the previous one together."""
    return any(value.tiles.joint for value in launch.constants.values() if hasattr(value, "tiles"))


def _takes_turns(launch: Launch) -> bool:
    """Return whether a forward's consumers are meant to issue their products in turns."""
    return any(value.tiles.turns for value in launch.constants.values() if hasattr(value, "tiles"))


QUERIES = [launch for launch in BACKWARD if launch.name == "backward_queries"]


def _tiles(launch: Launch) -> QueryTiles:
    widths = launch.variant.split()[0].removeprefix("hd").split("/")
    return backward_tiles(int(widths[0]), int(widths[-1]), deterministic=True).queries


@_of([x for x in FORWARD if _overlaps(x)] + [x for x in QUERIES if _tiles(x).exp_under_dp])
def test_exp_runs_under_products(launch, compiled):
    """exp2 of one block precedes the wait for the products of the other, and that of dQ the wait for dP."""
    loops = compiled[launch].program.unmasked_loops
    assert loops and all(share_of_exp_before_last_wait(loop) >= 0.95 for loop in loops)


@_of([launch for launch in FORWARD if _is_joint(launch)])
def test_maxima_run_under_products(launch, compiled):
    """Row maxima of a block precede the wait for P V of the previous one."""
    loops = compiled[launch].program.unmasked_loops
    assert loops and all(share_of_exp_before_last_wait(loop, "FMNMX") >= 0.9 for loop in loops)


@_of([launch for launch in QUERIES if _tiles(launch).turns])
def test_exp_of_dq_is_out_of_turn(launch, compiled):
    """The other consumer may issue its products before this one computes exp2."""
    loops = compiled[launch].program.unmasked_loops
    assert loops and all(exp_within_turns(loop) == 0 for loop in loops)


@_of([launch for launch in FORWARD if launch.name == "forward_kernel" and _takes_turns(launch)])
def test_products_are_issued_in_turns(launch, compiled):
    """A consumer issues both products of a step before the other one may, and computes exp2 out of turn."""
    loops = compiled[launch].program.unmasked_loops
    assert loops and all(products_within_turns(loop) == loop.counts["HGMMA"] for loop in loops)
    assert all(exp_within_turns(loop) == 0 for loop in loops)


@_of([launch for launch in BACKWARD if launch.name == "backward_keys"])
def test_turn_is_passed_at_its_place(launch, compiled):
    """After as many exp2 as tiles.py says; ptxas may pass it later, but not where both consumers wait for exp2."""
    after = launch.constants[(launch.kernel.arg_names.index("TURN_AFTER"),)]
    passed = [exp_within_turns(loop) for loop in compiled[launch].program.unmasked_loops]
    assert len(passed) == 2 and after <= min(passed) <= after + 6


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Makes a module with a change in its source."""

    def make(module: ModuleType, pattern: str, new: str) -> ModuleType:
        source, count = re.subn(pattern, new, Path(module.__file__).read_text())
        assert count, f"fault does not apply: {pattern!r}; plant what is there now"
        path = tmp_path / f"faulty_{module.__name__.split('.')[-1]}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return make


def test_hoisted_wait_is_seen(faulty):
    """Without the barrier wait that ends the basic block, ptxas waits for the products before the softmax."""
    wait = r" +mbarrier\.wait\(barriers\.k_full\.index\(after_index\).*\n"
    loops = compile_launch(forward_launch(faulty(kernel, wait, ""), 128, "full")).program.unmasked_loops
    assert loops and all(share_of_exp_before_last_wait(loop) < 0.5 for loop in loops)


def test_late_maxima_are_seen(faulty):
    """Without the barrier wait that ends the basic block, ptxas waits for P V before the maxima."""
    wait = r" +mbarrier\.wait\(barriers\.k_full\.index\(next_index\).*\n"
    loops = compile_launch(forward_launch(faulty(kernel, wait, ""), 64, "full")).program.unmasked_loops
    assert loops and all(share_of_exp_before_last_wait(loop, "FMNMX") < 0.5 for loop in loops)


def test_unused_barrier_is_seen(faulty, monkeypatch):
    """Two mbarriers that only a fixed order of additions to dQ uses lie, without it, in another buffer."""
    module = faulty(
        keys,
        r"dq_full = ds_full\n",
        """dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        for i in gl.static_range(2):
            mbarrier.init(dq_full.index(i), count=2)
""",
    )
    monkeypatch.setattr(host, "_KEYS", Launcher(module.backward_keys))
    both = overlaps(allocations(compile_launch(keys_launch(64, "band")).ttgir))
    assert both and all("dq_full" in (x.name for x in pair) for pair in both)


def test_converted_zeros_are_seen(faulty, monkeypatch):
    zeros = r"sm\.ds\.index\((.*)\)\.store\(gl\.zeros\(\[64, 64\], sm\.ds\.dtype, s_layout\)\)"
    module = faulty(fp8_keys, zeros, r"_store_ds(sm, sm.ds.index(\1), gl.zeros([64, 64], gl.float32, s_layout))")
    monkeypatch.setattr(fp8_backward, "_KEYS", Launcher(module.backward_keys_fp8))
    assert _converted_zeros(compile_launch(fp8_keys_launch(128)))


def test_moved_exp_is_seen(faulty, monkeypatch):
    """Without the wait that ends its basic block, ptxas computes exp after waiting for dP."""
    wait = r" +mbarrier\.wait\(sm\.full\.index\(k_slot\), k_parity\)\n"
    monkeypatch.setattr(host, "_QUERIES", Launcher(faulty(queries, wait, "").backward_queries))
    loops = compile_launch(dq_launch(192, "band")).program.unmasked_loops
    assert loops and all(share_of_exp_before_last_wait(loop) < 0.5 for loop in loops)


def test_exp_in_turn_is_seen(faulty, monkeypatch):
    passed = r" +_pass_turn\(sm, step, W\)\n(?= +p = )"
    monkeypatch.setattr(host, "_QUERIES", Launcher(faulty(queries, passed, "").backward_queries))
    loops = compile_launch(dq_launch(192, "band")).program.unmasked_loops
    assert loops and all(exp_within_turns(loop) > 16 for loop in loops)


def test_stores_of_single_elements_are_seen(faulty):
    """Without the hint the compiler cannot know that the places which it loads are far apart."""
    module = faulty(gather_scatter, r"tl\.multiple_of\((.*), 16\)", r"(\1)")
    assert _global_accesses(compile_launch(publish_launch(module)))[1]


def test_spills_and_serialised_products_are_seen():
    """With half of the registers the main loop spills, and ptxas serialises the products and says so."""
    launch = forward_launch(kernel, 128, "full")
    tight = compile_launch(replace(launch, options=launch.options | {"maxnreg": 128}))
    assert any(loop.spills_off_the_mask for loop in tight.program.unmasked_loops)
    assert any("C7512" in warning for warning in tight.warnings)
