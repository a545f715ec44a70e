//! Settings: flags and environment (args), a YAML file (file), checked and split into each module's own struct.
