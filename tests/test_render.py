"""Pictures of graphs: written, complete, readable without ``dot``, and small for large graphs."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from models import Skip
from torch import nn

import rkgb
from rkgb import Graphs, RenderWarning, Stools, make_all_graphs, print_all_graphs, print_graph
from rkgb.notebook import MOST_LINES
from rkgb.render import drawing as render_draw
from rkgb.render.columns import crossing, pages
from rkgb.render.parts import counted, tip
from rkgb.trace.lines import user_line
from rkgb.units import format_bytes, format_time
from rockmate.demo.gpt import GPT

dot = pytest.mark.skipif(shutil.which("dot") is None, reason="the program dot (Graphviz) is not installed")


@pytest.fixture(scope="module")
def tiny() -> Graphs:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return make_all_graphs(model, torch.randn(3, 8), costs="flops")


@pytest.fixture(scope="module")
def gpt() -> Graphs:
    return make_all_graphs(GPT(2, 32, 4, 16, 64), torch.randint(64, (2, 16)), costs="flops")


def stages(graphs: Graphs) -> list[render_draw.Graph]:
    return [graphs.B, graphs.D, graphs.S, graphs.K]


def drawn(path: Path, kind: str) -> list[str]:
    """Names of the boxes or ellipses ("node") or frames ("cluster") in an SVG."""
    names = re.findall(rf'class="{kind}">\s*<title>([^<]*)</title>', path.read_text(encoding="utf-8"))
    return [name for name in names if not re.fullmatch(r"cluster_column\d+", name)]


def shape(path: Path) -> float:
    """The width of an SVG by its height."""
    width, height = re.findall(r'viewBox="0.00 0.00 (\S+) (\S+)"', path.read_text(encoding="utf-8"))[0]
    return float(width) / float(height)


@dot
@pytest.mark.parametrize("stage", range(4))
def test_small_pictures_show_every_operation_with_its_source_line(tiny: Graphs, stage: int, tmp_path: Path) -> None:
    g = stages(tiny)[stage]
    svg = print_graph(g, "tiny", directory=tmp_path / "new folder")
    assert svg == tmp_path / "new folder" / "tiny.svg"
    text = svg.read_text(encoding="utf-8")
    assert all(f">{op}<" in text for op in ("linear", "relu", "2.linear" if stage else "linear_1"))
    assert re.search(r'xlink:title="[^"]*= linear\([^"]*# \w+\.py:\d+', text)
    assert (tmp_path / "new folder" / "tiny.gv").read_text(encoding="utf-8").startswith("digraph")


@dot
def test_all_stages_of_gpt(gpt: Graphs, tmp_path: Path) -> None:
    paths = print_all_graphs(gpt, "gpt", directory=tmp_path)
    assert [p.name for p in paths] == ["gpt_B.svg", "gpt_D.svg", "gpt_S.svg", "gpt_K.svg"]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert all(f">{op}<" in text for op in ("embedding", "layer_norm", "softmax", "gelu"))
        assert "gpt.py:" in text
    for path in paths[2:]:
        assert len(drawn(path, "cluster")) == len(gpt.S.blocks)
        text = path.read_text(encoding="utf-8")
        for k, number in enumerate(gpt.classes):
            assert f"block {k}, class {number} " in text
    backwards = sum(node.backward is not None for node in gpt.K.nodes)
    names = drawn(paths[3], "node")
    plain = [re.sub(r"^column\d+_", "", name) for name in names]
    assert sum(name.startswith("f") for name in plain) == len(gpt.K.nodes)
    assert sum(bool(re.fullmatch(r"b\d+", name)) for name in plain) == backwards
    assert {name for name in plain if name.startswith("d")} == {f"d{d}" for d in range(len(gpt.K.data))}
    assert len(names) == len(set(names)) > len(set(plain))  # what a later column reads stands at its top again


@dot
@pytest.mark.parametrize(("render_format", "magic"), [("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_other_formats(gpt: Graphs, render_format: str, magic: bytes, tmp_path: Path) -> None:
    for path in print_all_graphs(gpt, render_format=render_format, directory=tmp_path):
        content = path.read_bytes()
        assert path.suffix == f".{render_format}" and content.startswith(magic) and len(content) > 10_000


@dot
def test_forwards_stand_left_of_backwards(gpt: Graphs) -> None:
    lines = render_draw.draw(gpt.K).pipe("plain", encoding="utf-8").splitlines()
    columns: dict[str, dict[str, tuple[float, float]]] = {}
    for word in (line.split() for line in lines):
        if word[0] == "node":
            column, _, key = word[1].rpartition("_")
            columns.setdefault(column, {})[key] = float(word[2]), float(word[3])
    assert len(columns) > 1 and "loss" in columns[max(columns)]
    done, right = 0, 0.0
    for _, at in sorted(columns.items()):
        nodes = sorted(int(key[1:]) for key in at if key.startswith("f"))
        assert nodes == list(range(done, done + len(nodes)))
        for i in nodes:
            (x, y), (back, same) = at[f"f{i}"], at[f"b{i}"]
            assert all(x < at[f"d{d}"][0] < back for d in gpt.K.nodes[i].makes)
            assert y == pytest.approx(same)
        assert sorted(nodes, key=lambda i: -at[f"f{i}"][1]) == nodes
        assert min(x for x, _ in at.values()) > right
        done, right = done + len(nodes), max(x for x, _ in at.values())
    assert done == len(gpt.K.nodes)


@dot
@pytest.mark.parametrize("stage", "BDSK")
@pytest.mark.parametrize("limit", [40, 400])
def test_pictures_have_the_form_of_a_screen(
    gpt: Graphs, stage: str, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(render_draw, "LIMIT", limit)
    small = nn.Sequential(*(layer for k in range(5) for layer in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())))
    other = make_all_graphs(small, torch.randn(2, 3, 16, 16), costs="flops")
    for k, graphs in enumerate((gpt, other)):
        path = print_graph(getattr(graphs, stage), f"{stage}{k}", directory=tmp_path)
        assert 0.5 < shape(path) < 2, (k, shape(path))


@dot
def test_the_chain_of_many_blocks_is_in_columns(tmp_path: Path) -> None:
    layers = [layer for k in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    graphs = make_all_graphs(nn.Sequential(*layers), torch.randn(3, 8), costs="flops")
    chained = dataclasses.replace(graphs.S, blocks=tuple((i, i + 2) for i in range(0, 80, 2)))
    k = dataclasses.replace(graphs.K, s=chained)
    path = print_graph(dataclasses.replace(graphs, S=chained, K=k, classes=(0,) * 40), directory=tmp_path)
    assert 0.5 < shape(path) < 2
    frames = [name for name in drawn(path, "cluster") if name.startswith("cluster_chain")]
    assert len(frames) > 1 and "of 0 to 39" in path.read_text(encoding="utf-8")
    names = drawn(path, "node")
    assert all(names.count(f"f_chain{b}") == 1 for b in range(40)) and names.count("loss_chain") == 1


def test_columns_are_cut_where_least_passes() -> None:
    assert pages(9, 1, float) == [(0, 9)]
    assert pages(20, 2, lambda at: abs(at - 8)) == [(0, 8), (8, 20)]
    assert pages(20, 2, lambda at: abs(at - 2)) == [(0, 8), (8, 20)]  # not too far from the middle
    assert pages(3, 3, lambda _: 0.0) == [(0, 1), (1, 2), (2, 3)]
    passes = crossing([(), (0,), (1,), (0, 2)], [(0,), (1,), (2,), (3,)])
    assert [passes(at) for at in range(5)] == [0, 1, 2, 2, 0]


@dot
def test_large_graphs_are_drawn_by_their_distinct_blocks(
    gpt: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(render_draw, "LIMIT", 40)
    by_line, *paths = print_all_graphs(gpt, directory=tmp_path)
    assert "by source line" in by_line.read_text(encoding="utf-8")
    lines = {node.line for node in gpt.B.nodes}
    assert sum(name.startswith("line") for name in drawn(by_line, "node")) == len(lines)
    blocks = range(len(gpt.S.blocks))
    columns = {f"{column}_chain{b}" for column in "fdb" for b in blocks} | {"loss_chain"}
    *paths, chain = paths
    assert set(drawn(chain, "node")) == columns  # with three times as many boxes K would be a poster
    assert re.search(r"26 nodes · forward \d+ ns", chain.read_text(encoding="utf-8"))
    for path, expected in zip(paths, [{f"chain{b}" for b in blocks}] * 2, strict=True):
        names, text = drawn(path, "node"), path.read_text(encoding="utf-8")
        assert {name for name in names if "chain" in name} == expected
        assert len(drawn(path, "cluster")) == len(set(gpt.classes)) + 1
        assert "and 1 more like it" in text
        assert ">softmax<" in text and "gpt.py:34" in text
    assert "4.0 KiB to later blocks" in paths[0].read_text(encoding="utf-8")


@dot
def test_a_block_is_drawn_when_it_is_asked_for(gpt: Graphs, tmp_path: Path) -> None:
    start, stop = gpt.S.blocks[1]
    nodes = gpt.K.nodes[start:stop]
    for g in (gpt.K, gpt):
        path = print_graph(g, directory=tmp_path, block=1)
        assert path.name == f"{type(g).__name__}_block1.svg"
        names, text = drawn(path, "node"), path.read_text(encoding="utf-8")
        assert sum(name.startswith("block1_f") for name in names) == stop - start
        backwards = [node for node in nodes if node.backward is not None]
        assert sum(name.startswith("block1_b") and name[8:].isdigit() for name in names) == len(backwards)
        assert "class 1: block 1 and 1 more like it" in text and 0.3 < shape(path) < 3
    alone = drawn(print_graph(gpt.S, "one", directory=tmp_path, block=1), "node")
    assert alone and not [name for name in alone if not name.startswith("block1_")]


def test_a_block_that_does_not_exist_is_told(gpt: Graphs, tmp_path: Path) -> None:
    most = len(gpt.S.blocks) - 1
    with pytest.raises(ValueError, match=f"block={most + 1}: give a number from 0 to {most}, as in the chain"):
        print_graph(gpt.K, directory=tmp_path, block=most + 1)
    with pytest.raises(TypeError, match="B_graph has no blocks; give S, K, or what make_all_graphs made"):
        print_graph(gpt.B, directory=tmp_path, block=0)
    with pytest.raises(ValueError, match="block=0 is drawn, not written"):
        print_graph(gpt.K, "k.txt", directory=tmp_path, block=0)


@dot
def test_a_large_graph_without_blocks_is_cut_first(
    gpt: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(render_draw, "LIMIT", 40)
    uncut = gpt.S.with_blocks(((0, len(gpt.S.nodes)),))
    assert len(drawn(print_graph(uncut, directory=tmp_path), "cluster")) == len(set(gpt.classes)) + 1
    monkeypatch.setattr(render_draw, "LIMIT", 400)
    text = print_graph(uncut, directory=tmp_path).read_text(encoding="utf-8")
    assert "block 0, class 0 ·" in text and "block 0, class 0 (continued) ·" in text


def test_without_dot_the_source_is_written(tiny: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RenderWarning, match="dot is not installed.*apt install graphviz"):
        path = print_graph(tiny.K, "tiny", directory=tmp_path)
    assert path == tmp_path / "tiny.gv"
    assert "linear backward" in path.read_text(encoding="utf-8")
    assert not (tmp_path / "tiny.svg").exists()


def test_text_needs_no_dot(tiny: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    paths = print_all_graphs(tiny, "tiny", render_format="text", directory=tmp_path)
    assert [p.name for p in paths] == ["tiny_B.txt", "tiny_D.txt", "tiny_S.txt", "tiny_K.txt"]
    for path, g in zip(paths, stages(tiny), strict=True):
        assert path.read_text(encoding="utf-8") == f"{g}\n"


def test_unknown_format(tiny: Graphs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'jpeg'; it can be svg, pdf, png, text"):
        print_graph(tiny.B, render_format="jpeg", directory=tmp_path)


@dot
def test_a_name_may_have_the_ending_of_its_format(tiny: Graphs, tmp_path: Path) -> None:
    assert print_graph(tiny.K, "rk.png", directory=tmp_path) == tmp_path / "rk.png"
    assert print_graph(tiny.K, "rk.png", render_format="pdf", directory=tmp_path) == tmp_path / "rk.pdf"
    assert print_graph(tiny.K, "rk.v2", directory=tmp_path) == tmp_path / "rk.v2.svg"
    assert print_graph(tiny.K, "rk.TXT", directory=tmp_path) == tmp_path / "rk.txt"
    every = print_all_graphs(tiny, "all.pdf", directory=tmp_path)
    assert [path.name for path in every] == [f"all_{stage}.pdf" for stage in "BDSK"]
    assert (tmp_path / "rk.png").read_bytes().startswith(b"\x89PNG")


def test_open_shows_the_file(tiny: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[str] = []
    monkeypatch.setattr("graphviz.view", shown.append)
    path = print_graph(tiny.S, open=True, render_format="text", directory=tmp_path)
    assert shown == [str(path)] and path.name == "S_graph.txt"

    def fail(path: str) -> None:
        raise FileNotFoundError("xdg-open")

    monkeypatch.setattr("graphviz.view", fail)
    with pytest.warns(RenderWarning, match="no viewer"):
        assert print_graph(tiny.S, open=True, render_format="text", directory=tmp_path) == path


@dot
def test_parameters_of_one_operation_stand_together(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    graphs = make_all_graphs(model, torch.randn(3, 4), costs="flops")
    text = print_graph(graphs.S, directory=tmp_path).read_text(encoding="utf-8")
    for line in (
        "weight [6, 4], bias [6]",
        "weight [6], bias [6]",
        "running_mean [6], running_var [6]",
        "120 B",
        "96 B",
    ):
        assert f">{line}<" in text
    assert "parameter 1.weight: float32[6], 24 B&#10;parameter 1.bias" in text  # the tooltip has each
    tied = nn.Linear(4, 4, bias=False)
    shared = make_all_graphs(nn.Sequential(tied, nn.ReLU(), tied), torch.randn(3, 4), costs="flops")
    assert drawn(print_graph(shared.S, directory=tmp_path), "node").count("v1") == 1  # read twice, so on its own


def test_tooltips_are_no_longer_than_graphviz_takes() -> None:
    text = tip("\n".join(["x" * 1000] * 100))
    assert len(text) < 16384 and text.endswith("… and 75 more")
    assert tip("a\nb") == "a\nb"


def test_source_lines_of_libraries_beside_torch_are_shown() -> None:
    names: dict[str, Callable[[], str]] = {"user_line": user_line}  # type: ignore[dict-item]
    code = "def line() -> str:\n    return user_line()\n"
    exec(compile(code, torch.__path__[0] + "vision/models/resnet.py", "exec"), names)
    assert names["line"]() == "resnet.py:2"
    exec(compile(code, torch.__path__[0] + "/nn/functional.py", "exec"), names)
    assert names["line"]().startswith("test_render.py:")


@dot
def test_the_chain_says_what_passes_between_blocks(tmp_path: Path) -> None:
    graphs = make_all_graphs(Skip(), torch.randn(8, 8), costs="flops")
    cut = graphs.S.with_blocks(((0, 2), (2, 3), (3, 7), (7, 10)))
    chained = dataclasses.replace(graphs, S=cut, K=dataclasses.replace(graphs.K, s=cut), classes=(0, 1, 2, 3))
    text = print_graph(chained, "skip", directory=tmp_path).read_text(encoding="utf-8")
    edges = re.findall(r"<title>f_chain(\d)&#45;&gt;f_chain(\d)</title>.*?<text[^>]*> ([^<]*)</text>", text, re.DOTALL)
    assert edges == [("0", "1", "0 B"), ("1", "2", "256 B"), ("2", "3", "512 B in 2 tensors")]
    assert ">none<" in text  # the block that makes the mask has no backward
    assert "loss_chain" in drawn(tmp_path / "skip.svg", "node")


def test_what_is_no_graph_is_refused(tiny: Graphs, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list is no graph: give one of the graphs B, D, S, K"):
        print_graph([tiny.S], directory=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Linear is not what rkgb.make_all_graphs\(model, sample\) makes"):
        print_all_graphs(torch.nn.Linear(1, 1), directory=tmp_path)  # type: ignore[arg-type]


@dot
def test_graphs_show_their_chain_of_blocks(gpt: Graphs) -> None:
    shown = gpt._repr_mimebundle_()
    assert shown["text/plain"] == str(gpt) == f"<Graphs: {gpt.summary()}>"
    assert all(f"block {b} backward" in shown["image/svg+xml"] for b in range(len(gpt.S.blocks)))


def test_one_line_each(tiny: Graphs) -> None:
    assert [repr(g) for g in stages(tiny)] == [f"<{stage}_graph: 3 nodes>" for stage in "BDSK"]


@dot
@pytest.mark.parametrize("stage", range(4))
def test_the_picture_in_a_notebook_is_that_of_the_file_in_fewer_letters(
    gpt: Graphs, stage: int, tmp_path: Path
) -> None:
    g = stages(gpt)[stage]
    whole = print_graph(g, directory=tmp_path).read_text(encoding="utf-8")
    short = g._repr_mimebundle_()["image/svg+xml"]
    assert len(short) < 0.6 * len(whole)
    ours, theirs = (ElementTree.fromstring(text) for text in (short, whole))
    assert len(ours) == len(theirs) == 1, "all is within the group that Graphviz moves"

    def told(root: ElementTree.Element) -> list[tuple[str, str]]:
        """Texts and ellipses, and the tooltips of what is to be seen."""
        titled = "{http://www.w3.org/1999/xlink}title"
        shown = (x for x in root.iter() if kind(x) in ("text", "ellipse") or (x.get(titled) and len(x)))
        return sorted((kind(x), (x.get(titled) or x.text or "").strip()) for x in shown)

    def places(root: ElementTree.Element) -> list[float]:
        return sorted(float(x.get("x", 0)) for x in root.iter() if kind(x) == "text")

    def forms(root: ElementTree.Element) -> int:
        """Lines and boxes, of which a path may have several."""
        return sum(x.get("d", "").count("M") + (kind(x) in ("polygon", "rect")) for x in root.iter())

    assert told(ours) == told(theirs)
    assert places(ours) == pytest.approx(places(theirs), abs=0.1)
    assert forms(ours) == forms(theirs)


def kind(element: ElementTree.Element) -> str:
    """The tag of an SVG's element."""
    return element.tag.rpartition("}")[2]


@dot
def test_a_notebook_shows_the_picture(gpt: Graphs) -> None:
    for g in stages(gpt):
        shown = g._repr_mimebundle_()
        text, beginning = str(g), shown["text/plain"].splitlines()
        assert text.startswith("\n".join(beginning[:MOST_LINES]))
        assert len(beginning) <= MOST_LINES + 1 and beginning[-1].endswith("lines more: print the graph")
        assert "</svg>" in shown["image/svg+xml"] and "layer_norm" in shown["image/svg+xml"]


def test_a_notebook_without_dot_shows_the_text(tiny: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for g in stages(tiny):
        assert g._repr_mimebundle_() == {"text/plain": str(g)}


@dot
def test_calls_of_the_seed(tiny: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rkgb.print_all_graphs(tiny, name="GPT2_12", render_format="pdf")
    rkgb.print_graph(tiny.S)
    Stools.print_S_graph(tiny.S, render_format="png")
    made = {path.name for path in (tmp_path / "graphviz_dir").iterdir()}
    assert {f"GPT2_12_{stage}.pdf" for stage in "BDSK"} | {"S_graph.svg", "S_graph.png"} < made


@dot
def test_names_of_the_seed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    graphs = rkgb.test_rkgb(model, torch.randn(3, 8), render_format="svg", directory=tmp_path, costs="flops")
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == [f"Sequential_{stage}.svg" for stage in "BDKS"]
    assert Stools.print_S_graph(graphs.S, "mine", directory=tmp_path) == tmp_path / "mine.svg"
    assert rkgb.test_rkgb.__test__ is False  # type: ignore[attr-defined]


@dot
def test_strange_names_are_drawn(tmp_path: Path) -> None:
    class Strange(nn.Module):
        def forward(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            a = tensors["<a&b>"]
            return {"input": a, "sum": (a + 1).detach() * torch.eye(3), "unused": a.sin()}

    graphs = make_all_graphs(Strange(), {"<a&b>": torch.randn(3, 3)}, costs="flops")
    for path in print_all_graphs(graphs, 'a "quoted" näme', directory=tmp_path):
        assert path.stat().st_size > 1000


def test_sizes_and_times() -> None:
    assert [format_bytes(n) for n in (0, 512, 1536, 2 * 2**20, 3 * 2**40, 5000 * 2**40)] == [
        "0 B", "512 B", "1.5 KiB", "2.0 MiB", "3.0 TiB", "5000.0 TiB",
    ]  # fmt: skip
    assert [format_time(t) for t in (340, 1500, 1_500_000, 2_300_000_000)] == ["340 ns", "1.5 us", "1.5 ms", "2.3 s"]
    assert counted(["view", "add", "view"]) == "view ×2, add"
    assert counted("abcdef", limit=2) == "a, b, …"
