"""What batches are, in a few letters."""

import numpy as np
import xxhash


def hash_of_ten_batches(batches) -> str:
    """Of names, dtypes, shapes and values of the first ten."""
    hashed = xxhash.xxh3_64()
    for step in range(10):
        batch = batches.batch(step)
        for name, value in sorted((batch if isinstance(batch, dict) else batch._asdict()).items()):
            if value is not None and name != "lengths":  # which follow from the others
                array = np.asarray(value)
                hashed.update(f"{name} {array.dtype} {array.shape}".encode())
                hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()
