"""The dispatcher takes one event and returns actions (`dispatcher`); the other modules hold rules that it applies."""
