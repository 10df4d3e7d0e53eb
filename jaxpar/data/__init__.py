"""What a run learns from: texts as token ids, images, and the batches that are read of them."""
