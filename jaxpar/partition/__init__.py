"""How a model is divided over a mesh: arithmetic, and where the arrays of its layers are stored."""
