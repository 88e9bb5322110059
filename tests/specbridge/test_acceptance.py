"""Acceptance files: what is accepted, what is refused and how, and what a file promises."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specbridge.acceptance import FORMAT, Acceptance, best_paths, parse, read
from specbridge.acceptance_model import Curves, label, resolve
from specbridge.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "acceptance"
GOOD: dict[str, Any] = {
    "format": FORMAT,
    "name": "by hand",
    "depths": 3,
    "ranks": 2,
    "classes": [
        {
            "weight": 0.25,
            "true": [[0.9, 0.05], [0.8, 0.1], [0.7, 0.2]],
            "after_miss": [[0, 0], [0.5, 0.25], [0.4, 0.2]],
            "draft": [[0.95, 0.03], [0.85, 0.1], [0.6, 0.3]],
        },
        {"weight": 0.75, "true": [[0.5, 0.2], [0.4, 0.3], [0.3, 0.3]]},
    ],
}


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    file = copy.deepcopy(GOOD)
    at: Any = file
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return file


def by_enumeration(file: Acceptance, nodes: int) -> float:
    """Every path of ranks, weighed; the tree is the best `nodes` paths of all by the draft's own belief."""
    total = 1.0
    for c in file.classes:
        scored = []
        for depth in range(1, file.depths + 1):
            for path in product(range(file.ranks), repeat=depth):
                belief = 1.0
                for level, rank in enumerate(path):
                    belief *= c.draft[level][rank]
                scored.append((-belief, depth, path))
        tree = {path for _, _, path in sorted(scored)[:nodes]}
        for path in product(range(file.ranks + 1), repeat=file.depths):
            chance, on_path, accepted = c.weight, True, 0
            for level, rank in enumerate(path):
                row = (c.true if on_path else c.after_miss)[level]
                chance *= row[rank] if rank < file.ranks else 1 - sum(row)
                on_path = on_path and rank == 0
                accepted += accepted == level and path[: level + 1] in tree
            total += chance * accepted
    return total


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 5, 8, 14, 50])
def test_a_tree_s_promise_equals_enumeration(nodes: int) -> None:
    file = parse(GOOD, where="test")
    assert file.tree_length(nodes) == pytest.approx(by_enumeration(file, nodes), rel=1e-12)


def test_a_chain_s_promise_by_hand() -> None:
    file = parse(GOOD, where="test")
    own = 0.25 * (0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7) + 0.75 * (0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.3)
    assert file.chain_length() == pytest.approx(1 + own)
    assert file.chain_length(1) == pytest.approx(1 + 0.25 * 0.9 + 0.75 * 0.5)


def test_absent_tables_are_the_true_one() -> None:
    second = parse(GOOD, where="test").classes[1]
    assert second.draft == second.true == second.after_miss


def test_a_file_survives_being_written(tmp_path: Path) -> None:
    file = parse(GOOD, where="test")
    (tmp_path / "a.json").write_text(file.to_json())
    again = read(tmp_path / "a.json")
    assert again == file and again.label == file.label


def test_the_label_tells_files_of_one_name_apart() -> None:
    other = parse(changed(("classes", 0, "true", 0, 0), 0.89), where="test")
    assert other.name == "by hand" and other.label != parse(GOOD, where="test").label


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "specbridge-acceptance-9", "this build reads 'specbridge-acceptance-1'"),
        (("more",), 1, "key 'more' is not known"),
        (("name",), "", "name is ''"),
        (("depths",), 0, r"depths is 0; it must be an integer in \[1, 1024\]"),
        (("depths",), 4, r"classes\[0\].true has 3 rows; one row for each of 4 depths"),
        (("ranks",), 3, r"classes\[0\].true\[0\] has 2 entries; .* each of 3 ranks"),
        (("classes",), [], "at least one class"),
        (("classes", 0, "weight"), -0.5, r"classes\[0\].weight is -0.5"),
        (("classes", 0, "weight"), 0.5, "weights of the classes sum to 1.25"),
        (("classes", 0, "true", 1, 0), 1.5, r"true\[1\]\[0\] is 1.5; it must be a probability"),
        (("classes", 0, "true", 1, 0), float("nan"), r"true\[1\]\[0\] is nan"),
        (("classes", 0, "true", 1, 0), "0.5", r"true\[1\]\[0\] is '0.5'"),
        (("classes", 0, "true", 1, 0), 0.95, r"true\[1\] sums to 1.05"),
        (("classes", 0, "draft", 2, 1), 0.39, None),
        (("classes", 0, "draft", 2, 0), 0.2, r"draft\[2\]\[1\] is 0.3 after 0.2; .* must not rise"),
        (("classes", 0, "draft", 2), [0, 0], r"draft\[2\]\[0\] is 0; the best candidate needs more"),
        (("classes", 1, "true", 1, 1), 0.5, r"true, which stands for the draft too,\[1\]\[1\] is 0.5"),
        (("classes", 1, "other"), 1, "must be an object with the keys"),
        (("provenance",), 3, "provenance is 3"),
    ],
)
def test_a_malformed_file_is_refused_by_name(path: tuple[str, ...], value: Any, message: str | None) -> None:
    if message is None:
        parse(changed(path, value), where="file x")
        return
    with pytest.raises(ConfigError, match="^file x: .*" + message):
        parse(changed(path, value), where="file x")


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; record or fit one"):
        resolve(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="does not parse as JSON"):
        resolve(str(tmp_path / "bad.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="format is 'list'"):
        resolve(str(tmp_path / "list.json"))


def test_a_file_of_fewer_depths_than_the_drafter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert resolve(str(tmp_path / "a.json"), depths=2).depths == 3
    with pytest.raises(ConfigError, match="has 3 depths, the drafter goes 4 deep: .* block of 5 or more"):
        resolve(str(tmp_path / "a.json"), depths=4)


@pytest.mark.parametrize("depths", [3, 7, 15])
@pytest.mark.parametrize("mean", [1.3, 2.5, 3.9])
def test_a_mean_is_the_length_of_a_chain(mean: float, depths: int) -> None:
    assert resolve(str(mean), depths=depths).chain_length() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("text", ["1", "0.5", "-3", "nan", "inf"])
def test_an_impossible_mean_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--simulate-acceptance {text}: a mean acceptance length"):
        resolve(text)


def test_a_mean_beyond_the_block_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mean acceptance length of 8.5 .* with 7 drafts.* above 1 and below 8"
    ):
        resolve("8.5", depths=7)


def test_both_services_name_a_setting_alike(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert label("") == ""
    assert label("3.5") == label("3.50") == "mean 3.5"
    assert label(str(tmp_path / "a.json")) == read(tmp_path / "a.json").label


def test_the_family_obeys_the_schema_and_the_tree_gains_over_the_chain() -> None:
    made = Curves().with_chain(4.0, depths=15).acceptance("x")
    again = parse(json.loads(made.to_json()), where="test")
    assert again.chain_length() == pytest.approx(4.0, abs=1e-3)
    lengths = [again.tree_length(n) for n in (8, 16, 64, 256)]
    assert lengths == sorted(lengths) and lengths[1] > 4.0
    assert best_paths(made.classes[0].draft, 3)[0] == (0,)


@pytest.mark.parametrize(
    ("name", "chain", "trees"),
    [
        ("gsm8k-like", 6.57, {16: 7.42, 256: 9.54}),
        ("alpaca-like", 3.12, {16: 3.94, 256: 5.09}),
    ],
)
def test_shipped_fits_reproduce_the_published_figures(
    name: str, chain: float, trees: dict[int, float]
) -> None:
    file = read(SHIPPED / f"{name}.json")
    assert file.depths == 15
    assert file.chain_length() == pytest.approx(chain, abs=2e-3)
    for nodes, length in trees.items():
        assert file.tree_length(nodes) == pytest.approx(length, rel=0.005)
    assert file.provenance["source"] and file.provenance["asked"]


def test_the_shipped_recording_says_where_it_is_from() -> None:
    file = read(SHIPPED / "smollm2-135m.json")
    assert file.depths == 7
    assert file.provenance["rounds"] >= 200
    replayed = file.provenance["replayed"]
    assert file.chain_length() == pytest.approx(replayed["chain"], rel=0.05)
    assert file.tree_length(16) == pytest.approx(replayed["tree of 16"], rel=0.08)
