"""The version of this package, for `sluice.__version__`, the User-Agent header and the package's metadata."""

__version__ = "0.1.0"
