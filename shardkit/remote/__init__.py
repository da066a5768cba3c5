"""Data that are not on this machine: stores of objects and web servers, by their URLs."""
