"""The journal of a dispatcher: values as JSON (`codec`), its lines (`lines`), and deciding all again (`replay`)."""
