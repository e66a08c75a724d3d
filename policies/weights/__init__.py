"""Weights from engines that run: the pieces of a checkpoint, the source of a new engine, and the tree of readers."""
