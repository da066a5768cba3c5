"""Samples that are the rows of arrays: `.npy`, `.npz`, idx (MNIST), CIFAR batches, HDF5.

rows.py      one field of all samples, and the source
finding.py   which of these formats a path has
binary.py    idx, and the batches of CIFAR
npy.py       `.npy` and `.npz`
hdf5.py      HDF5, by h5py
"""
