"""The dispatcher: one event in, actions out (`dispatcher`), and the rules it applies around the policies."""
