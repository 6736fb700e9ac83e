"""`megavis doctor` on this machine, and with missing, broken or unrelated packages."""

import importlib
import json
import sys

import pytest

from megavis.cli import main
from megavis.commands import doctor


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that shadows installed ones."""

    def write(name, files, version):
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    yield write
    for module in [m for m in sys.modules if m.partition(".")[0] in ("apex", "transformer_engine")]:
        del sys.modules[module]


def test_this_machine_can_train(capsys):
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["can_train"] is True
    found = {finding["name"]: finding for finding in answer["findings"]}
    for name in ("Python", "torch", "megatron-core", "deepspeed", "process group"):
        assert found[name]["found"], found[name]
        assert found[name]["required"]
    for finding in answer["findings"]:
        assert finding["purpose"]
        assert finding["detail"]
    assert found["process group"]["detail"] == "gloo, an all-reduce on cpu"


def test_wrong_all_reduce_is_reported(monkeypatch):
    from torch import distributed

    monkeypatch.setattr(distributed, "all_reduce", lambda numbers: numbers.zero_())
    finding = doctor._process_group()
    assert not finding.found
    assert finding.detail == "RuntimeError: gloo computes wrong sums on cpu"


def test_unrelated_apex_package_is_reported(package):
    package("apex", {"__init__.py": "", "amp.py": ""}, "0.9.10.dev0")
    finding = doctor.apex()
    assert not finding.found
    assert finding.detail == "the installed 'apex' is another project of that name, not NVIDIA's"
    assert finding.purpose == "training.kernels: apex"


def test_nvidia_apex_is_recognized(package):
    package("apex", {"__init__.py": "", "optimizers/__init__.py": "class FusedAdam: ..."}, "0.1")
    assert doctor.apex().found


def test_apex_import_error_is_reported(package):
    package("apex", {"__init__.py": "raise RuntimeError('built for another torch')"}, "0.1")
    assert not doctor.apex().found


def test_transformer_engine_without_its_pytorch_module(package):
    package("transformer_engine", {"__init__.py": ""}, "2.0")
    assert not doctor.transformer_engine().found


def test_transformer_engine_import_error_is_reported(package):
    files = {"__init__.py": "", "pytorch/__init__.py": "raise OSError('libcublas.so is missing')"}
    package("transformer_engine", files, "2.0")
    finding = doctor.transformer_engine()
    assert not finding.found
    assert finding.detail == "OSError: libcublas.so is missing"


def test_a_library_without_deepspeed_is_reported(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libaio.so.1")
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", None)
    finding = doctor._libaio()
    assert not finding.found
    assert finding.detail.startswith("ModuleNotFoundError: import of deepspeed.ops.op_builder")


def test_a_gpu_without_megatron_is_reported(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "megavis.model.kernel_compiler", None)
    finding = doctor.compiled_kernel()
    assert not finding.found
    assert finding.required
    assert finding.detail.startswith("ModuleNotFoundError: import of megavis.model.kernel_compiler")


def test_missing_requirements_set_the_exit_code(monkeypatch, capsys):
    missing = doctor.SystemCheck("torch", False, "not installed", "everything", required=True)
    optional = doctor.SystemCheck("libaio", False, "not installed", "offload to NVMe")
    monkeypatch.setattr(doctor, "examine", lambda: iter([optional]))
    args = type("Args", (), {"json": False})
    assert doctor.run(args) == 0
    assert "no   libaio  not installed; needed for: offload to NVMe" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: iter([missing, optional]))
    assert doctor.run(args) == 1
    assert "NO   torch" in capsys.readouterr().out
