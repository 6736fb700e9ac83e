"""Parameter counts against arithmetic, the headers of presets, and the paper."""

import json
import resource
from pathlib import Path

import pytest
from protocols import load_run

from megavis.cli import main
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_context
from megavis.parallel.workers import WorkerPool
from megavis.planning.parameters import by_part, count_parameters

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[2] / "yaml_configs/igpt"
PAGE = Path(__file__).parents[2] / "docs/papers/igpt.md"
# Generative Pretraining from Pixels, section 3.3 and Table 2.
PUBLISHED = {"s": 76e6, "m": 455e6, "l": 1362e6, "xl": 6801e6}
# Models that the paper trains (Table 5), and others.
TRAINED = ("s_32", "m_32", "l_32", "l_48", "xl_64", "s_32_bert", "m_32_bert", "l_32_bert")
NAMES = [*TRAINED, "s_48", "s_64", "m_48", "m_64", "l_64", "xl_32", "xl_48"]


def read(name):
    return load_run("igpt", name)


def count_presets(launch, names):
    """Return the counts, and the growth of this process's peak memory in bytes."""
    context = open_context(launch, device="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = {name: count_parameters(build_objective(read(name), context)) for name in names}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    close_context()
    return counts, grown * 1024


@pytest.fixture(scope="module")
def counted():
    with WorkerPool(1, preload=("megavis.training.trainer",)) as pool:
        return pool.run(count_presets, 1, NAMES)[0]


@pytest.mark.parametrize("name", NAMES)
def test_counts_match_arithmetic_and_headers(counted, name):
    config, parts = read(name), by_part(counted[0][name])
    width, layers = config.model.hidden_size, config.model.num_layers
    colours, pixels = config.objective.vocabulary_size, config.data.image_size**2
    start = width if config.objective.mode == "autoregressive" else 0
    assert parts == {
        "embedding": (colours + pixels) * width + start,
        "blocks": layers * (12 * width**2 + 2 * width),
        "head": width + colours * width,
    }
    # A model without a file has its count, if published, in the page of the paper.
    header, total = PRESETS / f"{name}.yaml", sum(parts.values())
    text = (header if header.exists() else PAGE).read_text(encoding="utf-8")
    for count in (total, *(parts.values() if header.exists() else ())) if name in TRAINED else ():
        assert f" {count:,}" in text


@pytest.mark.parametrize("name", TRAINED)
def test_counts_match_the_paper(counted, name):
    total = sum(matrix.parameters for matrix in counted[0][name])
    assert total == pytest.approx(PUBLISHED[name.partition("_")[0]], rel=0.01)


def test_counting_allocates_no_weights(counted):
    assert counted[1] < 200e6, "6.8 billion parameters would take 27 GB"


def test_params_command(capsys):
    path = str(PRESETS / "s_32.yaml")
    assert main(["params", path, "model.num_layers=2", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["total"] == sum(tree["parts"].values())
    assert tree["total"] == sum(matrix["parameters"] for matrix in tree["matrices"])
    query = next(m for m in tree["matrices"] if m["name"].endswith("linear_qkv.weight"))
    assert query["name"] == "blocks.*.self_attention.linear_qkv.weight"
    assert (query["shape"], query["copies"]) == ([1536, 512], 2)
    assert main(["params", path, "model.num_layer=2"]) == 2
    assert capsys.readouterr().err.startswith("error: command line: model.num_layer: ")
    assert main(["params", path]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "igpt_s_32: 76,571,648 parameters"
    assert len(table) == 1 + 3 + len(tree["matrices"])


def test_several_stacks_are_listed(capsys):
    folder = PRESETS.parent
    # Expected FLOPs: linear layers and attention of each block, and the linear layer above a stack.
    path = str(folder / "mae/vit_b16.yaml")
    assert main(["params", path, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    lower, upper = 50 * (24 * 768**2 + 4 * 50 * 768), 197 * (24 * 512**2 + 4 * 197 * 512)
    maps = 2 * 50 * 768 * 512, 2 * 197 * 512 * 768
    assert [(s["name"], s["num_layers"], s["num_tokens"]) for s in tree["stacks"]] == [
        ("blocks", 12, 50),
        ("decoder", 8, 197),
    ]
    found = [stack["flops"] for stack in tree["stacks"]]
    assert found == pytest.approx([3 * (12 * lower + maps[0]), 3 * (8 * upper + maps[1])])
    assert main(["params", path]) == 0
    table = capsys.readouterr().out.splitlines()[2:7]
    names = ["embedding", "blocks", "bridge", "decoder", "head"]
    assert [row.split()[0] for row in table] == [*tree["parts"]] == names
    assert table[3].split()[1:6] == ["25,219,072", "8", "512", "16", "197"]


@pytest.mark.parametrize(
    ("name", "inside", "phases"),
    [
        ("givt/encoder_decoder", "embedding.encoder.blocks", ["once", "step"]),
        ("darl/demo", "head.decoder", ["step", "step"]),
    ],
)
def test_nested_stacks_are_listed(capsys, name, inside, phases):
    assert main(["params", str(PRESETS.parent / f"{name}.yaml"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    own = sum(m["parameters"] for m in tree["matrices"] if m["name"].startswith(f"{inside}."))
    assert tree["parts"][inside] == own
    assert tree["total"] == sum(tree["parts"].values())
    assert [stack["phase"] for stack in tree["stacks"]] == phases
    assert inside in [stack["name"] for stack in tree["stacks"]]


def test_memory_per_process(capsys):
    path = str(PRESETS / "xl_64.yaml")

    def memory(*words):
        assert main(["params", path, "--processes", "16", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["bytes_a_process"]

    # bf16 under ZeRO-3: 2 + 4 + 12 bytes per parameter, sharded, plus one gathered block in bf16.
    shared = memory()
    own, block = 6_810_875_904 / 16, 12 * 3072**2 + 2 * 3072
    assert shared["weights"] == pytest.approx(2 * own)
    assert shared["gradients"] == pytest.approx(4 * own)
    assert shared["optimizer"] == pytest.approx(12 * own)
    assert shared["gathered"] == 2 * block
    assert shared["total"] == pytest.approx(18 * own + 2 * block)
    # Tensor parallel size 8, data parallel size 2: ZeRO-1 shards the optimizer only. Norms,
    # positions and the start token are replicated.
    whole = 60 * 2 * 3072 + 3072 + (4096 + 1) * 3072
    own = (6_810_875_904 - whole) / 8 + whole
    split = memory("parallel.zero_stage=1", "parallel.tensor_model_parallel_size=8")
    assert split["total"] == pytest.approx((2 + 4) * own + 12 * own / 2)
    average = "optimizer.ema_decay=0.999"
    assert (shared["average"], memory(average)["average"]) == (
        0,
        pytest.approx(shared["weights"] * 2),
    )
    moved = memory("parallel.offload_optimizer=cpu", "parallel.offload_parameters=cpu", average)
    assert (moved["weights"], moved["optimizer"], moved["average"]) == (0, 0, 0)
    assert main(["params", path, "--processes", "48"]) == 2
    assert "is not divisible by the data-parallel size 48" in capsys.readouterr().err


def test_memory_of_linear_evaluation(capsys):
    path = str(PRESETS.parent / "mae" / "vit_b16_linear.yaml")
    words = ["data.num_images=32768", "training.precision=bf16", "parallel.zero_stage=1"]
    assert main(["params", path, *words, "--processes", "4", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    # Only the classifier is trained, by LARS: a gradient in float32, and of a quarter of it
    # momentum and a master weight.
    trained, memory = 769 * 1000, tree["bytes_a_process"]
    assert memory["weights"] == 2 * tree["total"]
    assert memory["gradients"] == 4 * trained
    assert memory["optimizer"] == (4 + 4) * trained / 4
