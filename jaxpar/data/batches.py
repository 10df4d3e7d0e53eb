"""Which batches a run reads of a text: windows of it as one long stream, or its lines in buckets."""

import numpy as np

from jaxpar.config import Config
from jaxpar.data.buckets import BucketedSentences, Sentences, choose_edges
from jaxpar.data.streams import TokenStreams


def make_batches(
    config: Config, tokens: np.ndarray, separator: int | None, seed: int | None = None
) -> TokenStreams | BucketedSentences:
    """The batches of a text that the config asks for.

    Args:
      tokens: integers [tokens].
      separator: the token that ends a line; not needed without buckets.
      seed: None for evaluation.
    Raises:
      ValueError: the text is too short, or has no lines.
    """
    data = config.data
    if not data.num_buckets:
        return TokenStreams(tokens, data.batch_size, data.seq_len, seed)
    if separator is None:
        raise ValueError(
            f"num_buckets={data.num_buckets} needs the token that ends a line; give one"
        )
    sentences = Sentences.split(tokens, separator)
    edges = choose_edges(
        sentences.lengths_S,
        data.num_buckets,
        data.seq_len // config.num_chunks,
        data.seq_len,
        data.batch_size,
    )
    return BucketedSentences(sentences, data.batch_size, edges, seed)
