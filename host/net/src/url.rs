//! Address of a bound transport, including the secret that authorizes a peer.

use core::fmt;
use core::str::FromStr;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Sha256;

use super::TransportFailure;
use crate::{Error, Result};

/// Secret of 128 random bits. Only processes that have received the URL know it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Nonce(pub(super) [u8; 16]);

impl Nonce {
    /// Creates a random nonce.
    ///
    /// # Errors
    /// [`Error::Call`] if the system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Returns the number by which a peer is known, which reveals nothing of the secret.
    pub(super) fn peer_id(self) -> PeerId {
        let mac: [u8; 32] = self.mac(&[b"peer id"]).finalize().into_bytes().into();
        let mut id = [0; 16];
        id.copy_from_slice(&mac[..16]);
        PeerId(id)
    }

    /// Returns a proof that this side knows the secret, bound to `message`.
    pub(super) fn prove(self, message: &[&[u8]]) -> [u8; Self::PROOF_BYTES] {
        self.mac(message).finalize().into_bytes().into()
    }

    /// Returns true if `proof` was made with this secret for `message`.
    pub(super) fn verify(self, message: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(message).verify_slice(proof).is_ok()
    }

    /// Length of a proof in bytes.
    pub(super) const PROOF_BYTES: usize = 32;

    fn mac(self, message: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).unwrap_or_else(|_| unreachable!());
        message.iter().for_each(|part| mac.update(part));
        mac
    }
}

/// Public number of one side of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerId(pub(super) [u8; 16]);

impl fmt::Debug for Nonce {
    /// Hides the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// Fills `bytes` with random bytes from the operating system.
pub(super) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| Error::Call {
        operation: "random number",
        peer: "the operating system".to_owned(),
        kind: TransportFailure::System,
        detail: error.to_string(),
    })
}

/// Address of a bound transport: `scheme://address/nonce`, such as `tcp://10.0.0.1:4711/<32 hex
/// digits>` or `shm://<name>/<32 hex digits>`. Any process that has the URL may connect, so
/// exchange it over a trusted channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    scheme: String,
    address: String,
    nonce: Nonce,
}

impl Url {
    /// Creates the URL of a provider's endpoint. `address` must not contain a slash.
    pub fn new(scheme: &str, address: &str, nonce: Nonce) -> Self {
        debug_assert!(!address.contains('/') && !scheme.contains(':'));
        Self {
            scheme: scheme.to_owned(),
            address: address.to_owned(),
            nonce,
        }
    }

    /// Returns the provider's scheme, such as `tcp`.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Returns the provider's address, such as `10.0.0.1:4711`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the secret that admits a peer.
    pub fn nonce(&self) -> Nonce {
        self.nonce
    }

    /// Formats the URL without its secret, for messages.
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
        // The text may contain a secret, so the message does not repeat it.
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

/// Serializes the URL as its text.
impl Serialize for Url {
    fn serialize<S: Serializer>(&self, serializer: S) -> core::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses the text of the URL.
impl<'de> Deserialize<'de> for Url {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> core::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_survive_their_text_and_others_are_refused() {
        let url = Url::new("tcp", "10.0.0.1:4711", Nonce::random().unwrap());
        assert_eq!(url.to_string().parse::<Url>().unwrap(), url);
        let json = serde_json::to_string(&url).unwrap();
        assert_eq!(json, format!("\"{url}\""));
        assert_eq!(serde_json::from_str::<Url>(&json).unwrap(), url);
        assert!(serde_json::from_str::<Url>("\"tcp://host\"").is_err());
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
