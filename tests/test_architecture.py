"""The rules of docs/architecture.md, checked on the source: who imports whom, sizes, what is listed where."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import work_order

ROOT = Path(__file__).parents[1]
PACKAGES = ("protos", "specbridge", "kernels", "target_service", "draft_service", "gateway")
SERVICES = ("target_service", "draft_service", "gateway")
MAX_LINES = 400
# Ours, and what each of ours may import of ours.
ALLOWED = {
    "protos": set(),
    "specbridge": {"protos"},
    "kernels": set(),
    **dict.fromkeys(SERVICES, {"specbridge", "kernels", "protos"}),
}
STANDARD = set(sys.stdlib_module_names)
KERNELS_MAY_USE = {"torch", "triton", "flashinfer", "numpy"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    at_start: bool  # run when the module is imported (not inside a function, not for type checkers only)


def sources() -> list[Path]:
    return sorted(
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> list[Import]:
    return list(_walk(tree(path), name_of(path), at_start=True))


def _walk(node: ast.AST, module: str, *, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                base = ".".join([*module.split(".")[: -child.level], *([base] if base else [])])
            # `from a import b` may name a module b.
            yield Import(base, child.lineno, at_start)
            yield from (Import(f"{base}.{alias.name}", child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, module, at_start=False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(ast.Module(child.body, []), module, at_start=False)
            yield from _walk(ast.Module(child.orelse, []), module, at_start=at_start)
        else:
            yield from _walk(child, module, at_start=at_start)


def root_of(module: str) -> str:
    return module.split(".")[0]


def uses(path: Path, *modules: str) -> list[Import]:
    return [i for i in imports(path) if any(i.module == m or i.module.startswith(m + ".") for m in modules)]


def broken(rule: list[str]) -> None:
    assert not rule, "\n" + "\n".join(rule)


def test_the_walker_sees_what_it_should(tmp_path: Path) -> None:
    text = (
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\n"
        "try:\n    import f\nexcept ImportError:\n    pass\n"
        "def g():\n    import h\nclass I:\n    import j\nfrom . import k\n"
    )
    found = {(i.module, i.at_start) for i in _walk(ast.parse(text), "p.q", at_start=True)}
    assert {
        ("a.b", True),
        ("c.d", True),
        ("e", False),
        ("f", True),
        ("h", False),
        ("j", True),
        ("p.k", True),
    } <= found


def test_imports_go_one_way() -> None:
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {name_of(path)} imports {i.module}"
            for path in sources()
            for i in imports(path)
            if root_of(i.module) in PACKAGES
            and root_of(i.module) != root_of(name_of(path))
            and root_of(i.module) not in ALLOWED[root_of(name_of(path))]
        ]
    )


def test_kernels_use_array_libraries_only() -> None:
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            if name_of(path).startswith("kernels")
            for i in imports(path)
            if root_of(i.module) not in STANDARD | KERNELS_MAY_USE | {"kernels"}
        ]
    )


def test_specbridge_imports_torch_only_inside_functions_of_a_few_modules() -> None:
    may = ("specbridge.channel.", "specbridge.checkpoint", "specbridge.models", "specbridge.builtin")
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            if name_of(path).startswith("specbridge")
            for i in uses(path, "torch", "transformers", "safetensors", "gguf")
            if (i.at_start or not name_of(path).startswith(may)) and not _type_only(path, i)
        ]
    )


def _type_only(path: Path, found: Import) -> bool:
    return any(
        isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and node.lineno < found.line <= (node.end_lineno or 0)
        for node in ast.walk(tree(path))
    )


def test_the_gateway_names_no_torch_at_all() -> None:
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            if name_of(path).startswith("gateway")
            for i in uses(path, "torch", "transformers", "kernels", "numpy")
        ]
    )


@pytest.mark.parametrize(
    "module", ["gateway.server", "gateway.rest", "specbridge.cli", "specbridge.serve", "specbridge.chat"]
)
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str({{'torch', 'transformers'}} & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_imports_a_service_s_server() -> None:
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            for i in uses(
                path, *(f"{service}.server" for service in SERVICES), *(f"{s}.__main__" for s in SERVICES)
            )
            if not name_of(path).endswith("__main__")
        ]
    )


def test_protobuf_stays_at_the_edge() -> None:
    def may(name: str) -> bool:
        last = name.rsplit(".", 1)[-1]
        return (
            last in ("server", "clients", "wire")
            or name.startswith("protos")
            or (name.startswith("specbridge.channel.") and last in ("producer", "consumer", "stream", "wire"))
        )

    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            if not may(name_of(path))
            for i in imports(path)
            if "_pb2" in i.module or i.module.startswith("google.protobuf")
        ]
    )


def test_environment_is_read_in_settings_only() -> None:
    found = []
    for path in sources():
        if name_of(path) == "specbridge.settings":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: os.{node.attr}")
    broken(found)


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("torch.distributed", ("parallel", "worker")),
        ("triton", ()),
        ("flashinfer", ()),
    ],
)
def test_libraries_have_their_place(module: str, allowed: tuple[str, ...]) -> None:
    broken(
        [
            f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
            for path in sources()
            if not name_of(path).startswith("kernels") and path.stem not in allowed
            for i in uses(path, module)
        ]
    )


def test_nothing_waits_by_wait_for() -> None:
    """On Python 3.11 a cancellation that meets the end of asyncio.wait_for is lost, and who was cancelled
    goes on; asyncio.timeout has no such moment."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute | ast.Name)
        and "wait_for" in (getattr(node, "attr", ""), getattr(node, "id", ""))
    ]
    assert not wrong


def test_print_is_the_command_line_s() -> None:
    may = {"specbridge.cli", "specbridge.chat", "protos.generate"}
    may |= {"specbridge.train_common", "specbridge.train_eval"}
    broken(
        [
            f"{path.relative_to(ROOT)}:{node.lineno}: print"
            for path in sources()
            if name_of(path) not in may
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
    )


def test_modules_are_of_readable_size_and_say_what_they_own() -> None:
    found = []
    for path in sources():
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}")
        if text.strip() and not ast.get_docstring(tree(path)):
            found.append(f"{path.relative_to(ROOT)}: no module docstring")
    broken(found)


def test_tests_are_no_packages() -> None:
    """A tests/kernels/__init__.py alone would shadow the package of that name."""
    broken([str(path) for path in (ROOT / "tests").rglob("__init__.py")])


def test_the_order_of_running_names_files_that_exist() -> None:
    broken([f"no file: {name}" for name in work_order.LONG if not (ROOT / name).is_file()])


def test_every_module_is_listed_in_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    # Below **package**, up to the next one or a heading, modules stand as `module.py` or `folder/module.py`.
    sections = dict(re.findall(r"^\*\*(\w+)\*\*(.*?)(?=^\*\*|^## )", page, re.M | re.S))
    listed = {
        f"{package}/{name}"
        for package, text in sections.items()
        for name in re.findall(r"`([\w/]+\.py)`", text)
    }
    present = {
        "/".join(path.relative_to(ROOT).parts)
        for path in sources()
        if path.name not in ("__init__.py", "__main__.py")
    }
    broken([f"not listed: {name}" for name in sorted(present - listed)])
    broken([f"listed, but not there: {name}" for name in sorted(listed - present)])


def test_public_names_are_sorted_and_exist() -> None:
    found = []
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                names = list(ast.literal_eval(node.value))
                module = importlib.import_module(name_of(path))
                if names != sorted(names):
                    found.append(f"{path.relative_to(ROOT)}: __all__ is not sorted")
                found += [
                    f"{path.relative_to(ROOT)}: {n} does not exist" for n in names if not hasattr(module, n)
                ]
    broken(found)


def test_the_name_kernels_is_ours_beside_transformers() -> None:
    """A published package owns the same top-level name; with ours in place transformers must still work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import kernels

    assert kernels.__file__ is not None and Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
