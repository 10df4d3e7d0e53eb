"""What a run learns from: `corpus` makes token ids of texts, `streams` and `buckets` make batches; `images`.

Every batch is a function of the seed and the number of the step, whatever the mesh.
"""
