// Owns the precompiled torch header that all torch layers and tests reuse.
