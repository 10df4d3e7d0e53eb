"""What a task may report of an evaluation."""

import pytest

from jaxpar import Task
from jaxpar.training.evaluate import check_reported


def test_a_metric_may_not_have_the_name_of_a_baseline():
    with pytest.raises(ValueError, match="gives a metric 'error', but another number"):
        check_reported(Task(), 1.0, {"loss": 1.0, "error": 2.0}, ["error"])


def test_the_loss_is_reported_as_it_is():
    with pytest.raises(ValueError, match=r"returns 7 as 'loss', but the loss is 1.5\nFix: use"):
        check_reported(Task(), 1.5, {"loss": 7.0})
    check_reported(Task(), float("nan"), {"loss": float("nan")})
    check_reported(Task(), 1.5, {"perplexity": 4.5}, ["perplexity of a guess"])
