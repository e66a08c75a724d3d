"""The event log of a dispatcher: values as JSON (`codec`), lines (`lines`), and deciding it all again (`replay`)."""
