"""Data on the host, in NumPy arrays: sources, partitions, known heterogeneity; federations and populations of them."""

from jfcl.data.build import Federation, build
from jfcl.data.dataset import Dataset, tokenize
from jfcl.data.drift import PATTERNS, Drift, drift_pattern
from jfcl.data.generate import generate_store, mixture_of, open_stores
from jfcl.data.heterogeneity import HETEROGENEITY
from jfcl.data.packing import in_bytes
from jfcl.data.partition import (
    PARTITIONS,
    by_distribution,
    by_label,
    by_sizes,
    by_writer,
    dirichlet,
    iid,
    label_groups,
    lognormal,
    pathological,
    power_law,
    quantity,
    stratified,
)
from jfcl.data.pools import hold_out
from jfcl.data.readers import from_arrays, from_frame, from_huggingface, from_torch
from jfcl.data.sources import DATASETS, load
from jfcl.data.store import ClientStore, Population
from jfcl.data.synthetic import fc_regression, ifca_regression
from jfcl.data.tables import read_rows
from jfcl.data.tfds_source import from_tfds
