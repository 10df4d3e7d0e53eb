"""The AWD recipe with the sizes of the laws."""

from lib.laws import MODEL, random_batch
from recipes.awd import AWD, late


def awd(task=MODEL, **options):
    """The recipe with the sizes of a task, and with this alone of what it adds, but for held masks."""
    rates = dict.fromkeys(("input_dropout", "output_dropout"), task.dropout)
    off = dict.fromkeys(("word_dropout", "drop_connect", "ar", "tar"), 0.0) | {"window_mean": 0}
    return AWD(**vars(task) | rates | off | options)


@random_batch.register
def _(task: AWD, rng, shape, starts):
    batch = random_batch.dispatch(object)(task, rng, shape, starts)
    if task.window_mean:
        batch.targets_BT[:, :3] = -1
        batch = late(batch)._replace(padding=3, rate=0.5)
    return batch
