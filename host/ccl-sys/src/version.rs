//! Version number of a library.

use core::fmt;

/// Version in the encoding of `ncclGetVersion`: `major * 1000 + minor * 100 + patch` up to version
/// 2.8, and `major * 10000 + minor * 100 + patch` for version 2.9 and later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(i32);

impl Version {
    /// Creates a version from its encoding.
    pub const fn new(code: i32) -> Self {
        Self(code)
    }

    /// Returns the encoding.
    pub const fn code(self) -> i32 {
        self.0
    }

    /// Returns major, minor and patch.
    pub const fn parts(self) -> (i32, i32, i32) {
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        (self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::Version;

    #[test]
    fn both_encodings_decode() {
        for (code, text) in [
            (2_402, "2.4.2"),
            (2_804, "2.8.4"),
            (20_908, "2.9.8"),
            (21_005, "2.10.5"),
            (22_800, "2.28.0"),
            (23_203, "2.32.3"),
        ] {
            assert_eq!(Version::new(code).to_string(), text);
        }
        assert!(Version::new(2_804) < Version::new(20_908));
    }
}
