"""Codecs: arrays in, bytes out, one file each behind the interface of `pltpack.codec.base`; they never see files."""
