"""Which worker runs what. One policy a file, named as its paper names it; `registry` lists them all."""
