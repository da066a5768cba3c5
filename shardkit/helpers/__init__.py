"""Parts of any program: optional libraries, options by name, progress, processes, long arrays.

Each imports only those on lines below its own:

    order
    json_process keywords mapped progress yaml
    checked clock extras familiar indices mistyped names os_errors part_of pickled_process
      prefetch processors words
"""
