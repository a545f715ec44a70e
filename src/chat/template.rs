//! Messages to segments, byte for byte as the official encoder renders them.
