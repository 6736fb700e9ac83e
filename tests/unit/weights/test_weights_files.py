"""Files that are no weights: pointers of Git LFS, and pickled objects."""

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.weights.released import read_arrays, read_tensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (read_tensors, "model.safetensors"),
        (read_weights_file, "model.safetensors"),
        (read_weights_file, "model.bin"),
        (read_arrays, "givt.npz"),
    ],
)
def test_a_pointer_of_git_lfs_is_refused(tmp_path, read, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS in place of the file"):
        read(tmp_path / name)


def test_nobody_is_advised_to_unpickle(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for content in ((tmp_path / "objects.npy").read_bytes(), b"not an archive"):
        (tmp_path / "givt.npz").write_bytes(content)
        with pytest.raises(UserError, match="other content, and pickled objects are not opened$"):
            read_arrays(tmp_path / "givt.npz")
