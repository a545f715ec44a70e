//! Safe read-only file maps: the length is checked before use and the map lives as long as any view of it.
