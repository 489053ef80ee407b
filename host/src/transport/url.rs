//! Where a bound transport listens, and the word that lets a peer in.

use core::fmt;
use core::str::FromStr;

use super::TransportFailure;
use crate::{Error, Result};

/// 128 random bits that only those know whom the url was given to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nonce(pub(super) [u8; 16]);

impl Nonce {
    /// A fresh one.
    ///
    /// # Errors
    /// [`Error::Transport`] when the system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Nonce {
    /// Not the secret itself.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// Random bytes of the operating system.
pub(super) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| Error::Transport {
        operation: "random number",
        peer: "the operating system".to_owned(),
        kind: TransportFailure::System,
        detail: error.to_string(),
    })
}

/// Address of a bound transport: `scheme://address/nonce`, such as `tcp://10.0.0.1:4711/<32 hex
/// digits>` or `shm://<name>/<32 hex digits>`. Who holds it may connect, so it is to be exchanged
/// over something trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    scheme: String,
    address: String,
    nonce: Nonce,
}

impl Url {
    /// The url of a provider's endpoint. `address` holds no slash.
    pub fn new(scheme: &str, address: &str, nonce: Nonce) -> Self {
        debug_assert!(!address.contains('/') && !scheme.contains(':'));
        Self {
            scheme: scheme.to_owned(),
            address: address.to_owned(),
            nonce,
        }
    }

    /// Which provider it belongs to, such as `tcp`.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// The provider's address, such as `10.0.0.1:4711`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The word that lets a peer in.
    pub fn nonce(&self) -> Nonce {
        self.nonce
    }

    /// The url without its secret, for messages.
    pub fn public(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/", self.scheme, self.address)?;
        self.nonce
            .0
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Url {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once("://").and_then(|(scheme, rest)| {
            let (address, digits) = rest.split_once('/')?;
            let fits = !scheme.is_empty() && digits.len() == 32 && digits.is_ascii();
            let mut nonce = [0; 16];
            for (at, byte) in nonce.iter_mut().enumerate() {
                let pair = digits.get(2 * at..2 * at + 2)?;
                *byte = u8::from_str_radix(pair, 16).ok()?;
            }
            fits.then(|| Self::new(scheme, address, Nonce(nonce)))
        });
        // The text may hold a secret, so it is not repeated.
        parsed.ok_or_else(|| Error::InvalidArgument {
            operation: "transport url",
            detail: format!(
                "a text of {} bytes is not of the form scheme://address/<32 hex digits>; pass what \
                 bind returned",
                text.len()
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_survive_their_text_and_others_are_refused() {
        let url = Url::new("tcp", "10.0.0.1:4711", Nonce::random().unwrap());
        assert_eq!(url.to_string().parse::<Url>().unwrap(), url);
        assert!(!format!("{url:?}").contains(&url.to_string()[20..]));
        for bad in [
            "",
            "tcp://1.2.3.4:5",
            "tcp://1.2.3.4:5/12",
            "://x/00112233445566778899aabbccddeeff",
            "tcp://x/00112233445566778899aabbccddeeffgg",
            "tcp://x/0g112233445566778899aabbccddeeff",
        ] {
            assert!(bad.parse::<Url>().is_err(), "{bad}");
        }
    }
}
