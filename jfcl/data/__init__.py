"""Data on the host: sources, partitions, known heterogeneity, and federations built from them. NumPy only."""

from jfcl.data.build import Federation, build
from jfcl.data.heterogeneity import HETEROGENEITY
from jfcl.data.partition import PARTITIONS
from jfcl.data.sources import DATASETS, Dataset, load
from jfcl.data.text import tokenize

__all__ = ["DATASETS", "HETEROGENEITY", "PARTITIONS", "Dataset", "Federation", "build", "load", "tokenize"]
