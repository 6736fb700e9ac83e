"""A script that opens exported folders without megavis and compares outputs.

Its argument is a folder with, for each case, the exported `NAME/` and `NAME.safetensors` with
`inputs`, `expected` and, for MAE, `noise`. It prints a line `NAME DIFFERENCE` per case.
"""

import json
import re
import sys
from pathlib import Path

sys.modules["megavis"] = None  # Importing megavis raises ImportError.

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def by_transformers(folder, case):
    settings = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, settings["architectures"][0])
    options = {"add_pooling_layer": False} if kind is transformers.ViTModel else {}
    model, loaded = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not loaded["missing_keys"], loaded["missing_keys"]
    assert not loaded["unexpected_keys"], loaded["unexpected_keys"]
    if kind is transformers.ImageGPTForCausalImageModeling:
        start = torch.full((len(case["inputs"]), 1), model.config.vocab_size - 1)
        return model(input_ids=torch.cat([start, case["inputs"][:, :-1]], dim=1)).logits
    if kind is transformers.ViTMAEForPreTraining:
        logits = model.eval()(case["inputs"], noise=case["noise"]).logits
        # The expected outputs are those of the hidden patches, which are last in the order.
        hidden = case["order"][:, -case["expected"].shape[1] :]
        return logits.take_along_dim(hidden[..., None], 1)
    outputs = model.eval()(case["inputs"])
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def by_timm(folder, case):
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    features = model.forward_features(case["inputs"])
    return model.forward_head(features) if model.num_classes else features


def by_card(folder, case):
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    names = {}
    exec(code[code.index("import json") :], names)
    return names["features"](str(folder), case["inputs"])


with torch.no_grad():
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        folder, case = path.with_suffix(""), load_file(path)
        opens = {"timm": by_timm, "own": by_card}.get(path.stem.split("_")[-1], by_transformers)
        difference = (opens(folder, case) - case["expected"]).abs().max()
        print(path.stem, float(difference))
