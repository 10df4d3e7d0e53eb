"""Arrays that are none of NumPy's, or have another order of bytes, in batches."""

import dataclasses

import jax
import numpy as np
import pytest
from lib import api
from lib.models import Regress, Series

from jaxpar import ArrayBatches, SeriesBatches, init_state, make_train_step

X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)


class OnDisk:
    """As a dataset of h5py: it gives slices alone."""

    shape, ndim, dtype = X.shape, X.ndim, X.dtype

    def __len__(self):
        return len(X)

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        return X[rows]


MAKE = {
    "rows": lambda x, seed: ArrayBatches({"x": x}, 8, seed),
    "series": lambda x, seed: SeriesBatches({"x": x}, 4, 5, seed),
    "packed": lambda x, seed: api.PackedBatches({"x": x}, [20, 7, 13, 20], 2, 5, seed),
}


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("kind", MAKE)
def test_what_gives_slices_is_read(kind, seed):
    plain, on_disk = (MAKE[kind](x, seed) for x in (X, OnDisk()))
    for step in (0, plain.num_windows - 1):
        jax.tree.map(np.testing.assert_array_equal, plain.batch(step), on_disk.batch(step))


def test_datasets_of_h5py_are_read(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X.astype(">f4")
        for make in MAKE.values():
            found, wanted = (make(x, 0).batch(1)["x"] for x in (file["x"], X))
            np.testing.assert_array_equal(found, wanted)


@dataclasses.dataclass(frozen=True)
class Swapped(Regress):
    """With the bytes of floats and whole numbers in the other order."""

    kinds: tuple[str, ...] = ("dense",)
    order: str = ">"

    def make_batches(self, split, seed=None):
        arrays = super().make_batches(split, seed).arrays
        given = {name: a.astype(a.dtype.newbyteorder(self.order)) for name, a in arrays.items()}
        return Series(given, self.batch_size, self.seq_len, seed)


def test_bytes_in_another_order_are_read():
    losses = []
    for order in "<>":
        task = Swapped(order=order)
        assert task.make_batches("train", 0).batch(0)["x"].dtype.str == order + "f4"
        assert api.abstract_batch(task, "dp2")["x"].dtype == np.float32
        step = make_train_step(task, "dp2")  # which looks at rows that it has read itself
        _, metrics = step(init_state(task, "dp2"), task.make_batches("train", 0).batch(0))
        losses.append(float(metrics.loss))
    assert losses[0] == losses[1]
