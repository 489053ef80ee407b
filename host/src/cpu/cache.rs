//! The caches of this machine.

use std::fs;
use std::sync::OnceLock;

/// Where the system does not say.
const USUAL: u64 = 32 << 20;

/// Bytes of the greatest cache of the first core, as the system reports them; read once.
pub(crate) fn last_level_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        (0..8)
            .filter_map(|index| {
                let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
                parse(&fs::read_to_string(path).ok()?)
            })
            .max()
            .unwrap_or(USUAL)
    })
}

/// `32768K`, as Linux writes it.
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
