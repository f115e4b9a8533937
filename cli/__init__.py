"""The ``pltpack`` command line: click commands that parse, call the Python API and print; no logic of their own.

Only click and the standard library may be imported at the top of these modules: ``pltpack --help`` answers at once.
"""
