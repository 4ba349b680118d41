"""FlashInfer's CuTe-DSL experts on the CPU.

Their module cannot be imported without nvidia-cutlass-dsl, and without that the library does not offer
them at all. So signatures, layouts and sizes are read from the installed source.
"""

import ast
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

FOLDER = "fused_moe/cute_dsl"


@cache
def _definitions(path: Path) -> dict[str, ast.AST]:
    """Returns what a file defines, by name; a method's has its class before it."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found.update({f"{node.name}.{method.name}": method for method in methods})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def _path(real: Any, file: str) -> Path:
    return Path(real.__file__).parent / FOLDER / file


def signature(real: Any, file: str, name: str) -> Callable[..., Any]:
    """Returns a function that takes what the library's takes, and does nothing."""
    node = _definitions(_path(real, file))[name]
    assert isinstance(node, ast.FunctionDef)
    arguments = deepcopy(node.args)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    nothing = ast.Constant(None)
    arguments.defaults = [nothing for _ in arguments.defaults]
    arguments.kw_defaults = [default and nothing for default in arguments.kw_defaults]
    bare = ast.FunctionDef(node.name, arguments, [ast.Pass()], [])
    return _run([bare], {})[node.name]  # type: ignore[no-any-return]


def functions(real: Any, file: str, *names: str) -> list[Callable[..., Any]]:
    """Returns functions of a file that call nothing but one another and PyTorch."""
    nodes = [_definitions(_path(real, file))[name] for name in names]
    scope = _run(nodes, {"torch": torch})
    return [scope[name] for name in names]


def constant(real: Any, file: str, name: str) -> Any:
    """Returns what a name is bound to, if it says so outright."""
    node = _definitions(_path(real, file))[name]
    assert isinstance(node, ast.expr)
    return ast.literal_eval(node)


def _run(nodes: list[Any], scope: dict[str, Any]) -> dict[str, Any]:
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    exec(compile(module, "<from the library's source>", "exec"), scope)
    return scope


class CpuCuteDslWrapper:
    """Computes what the wrapper would, and refuses what it would refuse.

    Attributes:
        launch: Goes around what would be a kernel.
        scratch_rows: The library's own: rows of memory between the products, by keyword.
    """

    launch: Callable[[Callable[..., None]], Callable[..., None]]
    scratch_rows: Callable[..., int]

    def __init__(self, *, num_experts: int, hidden_size: int, **sizes: Any) -> None:
        assert num_experts % 4 == 0, "the kernel that sorts takes a multiple of 4"
        assert max(sizes["top_k"], sizes["num_local_experts"]) <= num_experts <= 512
        assert hidden_size % 8 == 0
        assert sizes["intermediate_size"] % 32 == 0
        assert sizes["output_dtype"] in (torch.bfloat16, torch.float16)
        assert sizes["local_expert_offset"] == 0
        assert not sizes["use_fused_finalize"], "rows would be added up in any order"
        self.num_experts, self.hidden_size, self.sizes = num_experts, hidden_size, sizes

    def run(
        self,
        *,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        w1_weight: torch.Tensor,
        w2_weight: torch.Tensor,
        tactic: Any,
        moe_output: torch.Tensor,
        intermediate_buffer: torch.Tensor,
    ) -> None:
        num_local, size = self.sizes["num_local_experts"], self.sizes["intermediate_size"]
        assert x.is_contiguous()
        assert x.dtype == w1_weight.dtype == w2_weight.dtype == self.sizes["output_dtype"]
        assert moe_output.shape == x.shape
        assert w1_weight.shape == (num_local, 2 * size, self.hidden_size)
        assert w2_weight.shape == (num_local, self.hidden_size, size)
        assert token_selected_experts.dtype == torch.int32
        assert token_final_scales.dtype == torch.float32
        assert token_selected_experts.shape == (len(x), self.sizes["top_k"])
        num_rows = self.scratch_rows(
            num_tokens=len(x),
            top_k=self.sizes["top_k"],
            num_local_experts=num_local,
            tile_size=tactic[0],
        )
        assert intermediate_buffer.shape == (num_rows, size), "the library takes no other shape"
        assert intermediate_buffer.is_contiguous()
        self.launch(_run_experts)(
            x,
            token_selected_experts,
            token_final_scales,
            w1_weight,
            w2_weight,
            moe_output,
            intermediate_buffer,
            self.num_experts,
        )


def _run_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scales: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
    num_experts: int,
) -> None:
    assert int(expert_ids.max()) < num_experts, "there is no such expert"
    scratch.fill_(torch.nan)  # what was there is gone
    out.zero_()
    num_local, _, hidden_size = w1.shape
    up, gate = (part.flatten(1, 2) for part in w1.view(num_local, -1, 2, 32, hidden_size).unbind(2))
    for row, ids in enumerate(expert_ids.tolist()):
        for k, expert in enumerate(ids):
            if expert < num_local:
                y = w2[expert] @ (F.silu(gate[expert] @ x[row]) * (up[expert] @ x[row]))
                out[row] += scales[row, k].to(y.dtype) * y


def cpu_wrapper(
    real: Any, bind: Callable[..., Any], launch: Callable[..., Any]
) -> type[CpuCuteDslWrapper]:
    """Returns the stand-in, its calls bound to the installed source.

    Args:
        real: The library.
        bind: Takes a name, what the library defines, and what takes its place.
        launch: Takes a function that would be a kernel to what is called for it.
    """
    _, rows = functions(real, "moe_utils.py", "get_max_num_tiles", "get_max_num_permuted_tokens")
    bound = {
        name: bind(
            f"cutedsl.{name}",
            signature(real, "sm90_fused_moe.py", f"CuteDslBf16MoEWrapper.{name}"),
            getattr(CpuCuteDslWrapper, name),
            is_method=True,
        )
        for name in ("__init__", "run")
    }
    others = {"scratch_rows": staticmethod(rows), "launch": staticmethod(launch)}
    return type("CuteDslBf16MoEWrapper", (CpuCuteDslWrapper,), {**bound, **others})
