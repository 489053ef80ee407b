//! Size of the last-level cache of this machine.

use std::fs;
use std::sync::OnceLock;

/// The assumed cache size in bytes if the system does not report one.
const DEFAULT_BYTES: u64 = 32 << 20;

/// Returns the size in bytes of the largest cache of core 0, according to sysfs. The size is read
/// once.
pub(crate) fn last_level_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        (0..8)
            .filter_map(|index| {
                let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
                parse(&fs::read_to_string(path).ok()?)
            })
            .max()
            .unwrap_or(DEFAULT_BYTES)
    })
}

/// Parses a size in the format of sysfs, such as `32768K`.
fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 10),
        Some(digits) if text.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_shl(shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse("32768K\n"), Some(32 << 20));
        assert_eq!(parse("1M"), Some(1 << 20));
        assert_eq!(parse("512"), Some(512));
        assert_eq!(parse("much"), None);
        assert!(last_level_bytes() > 0);
    }
}
