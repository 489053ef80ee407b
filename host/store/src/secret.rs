//! A secret that clients and server share, and the handshake in which each proves to the other that
//! it has the secret.
//!
//! The client sends [`HELLO`] and a nonce. The server answers with [`ACCEPTED`], a nonce and a
//! proof. The client sends its proof, and the server answers with [`ACCEPTED`]. A proof is the
//! HMAC-SHA256 of the role and both nonces, so it is useless in another connection and cannot be
//! reflected to its sender. The requests after the handshake are neither encrypted nor signed.

use core::fmt;
use std::io;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::{Error, Result};

/// First byte of a client that has a secret. No request of PyTorch begins with this byte.
pub(super) const HELLO: u8 = 0xF5;

/// Answer of the server: the handshake continues, or the proof of the client is correct.
pub(super) const ACCEPTED: u8 = 1;

/// Answer of the server: the proof of the client is wrong, or the server has no secret.
pub(super) const REFUSED: u8 = 2;

/// Answer of a server with a secret to a client without one. The server then closes the connection.
pub(super) const SECRET_WANTED: [u8; 8] = *b"FWSECRET";

/// Length in bytes of a nonce and of a proof.
pub(super) const BYTES: usize = 32;

/// A nonce or a proof.
pub(super) type Token = [u8; BYTES];

const VARIABLE: &str = "FUSEWIRE_STORE_SECRET";

/// A secret that the clients and the server of a TCP store share. Its text is never printed.
#[derive(Clone)]
pub struct StoreSecret(Arc<[u8]>);

/// The side that proves that it has the secret.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    Client,
    Server,
}

impl StoreSecret {
    /// Returns a secret of the given bytes. Use at least 16 random bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `bytes` is empty.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::invalid(
                "store options",
                "the secret of a store is empty",
            ));
        }
        Ok(Self(bytes.into()))
    }

    /// Returns the secret in `FUSEWIRE_STORE_SECRET`, or `None` if the variable is not set or is
    /// empty.
    pub fn from_env() -> Option<Self> {
        use std::os::unix::ffi::OsStrExt;
        let value = std::env::var_os(VARIABLE)?;
        Self::new(value.as_bytes()).ok()
    }

    fn mac(&self, role: Role, client: &Token, server: &Token) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(match role {
            Role::Client => b"fusewire store client 1\0",
            Role::Server => b"fusewire store server 1\0",
        });
        mac.update(client);
        mac.update(server);
        mac
    }

    /// Returns the proof that `role` has the secret, for the nonces of the client and the server.
    pub(super) fn prove(&self, role: Role, client: &Token, server: &Token) -> Token {
        self.mac(role, client, server)
            .finalize()
            .into_bytes()
            .into()
    }

    /// Returns true if `proof` equals the result of [`Self::prove`] for the other arguments.
    /// Compares in constant time.
    pub(super) fn verify(&self, role: Role, client: &Token, server: &Token, proof: &Token) -> bool {
        self.mac(role, client, server).verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret(..)")
    }
}

/// Returns random bytes from the operating system.
pub(super) fn nonce() -> io::Result<Token> {
    let mut nonce = Token::default();
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_role_nonces_and_secret_alone() {
        let secret = StoreSecret::new(b"s").unwrap();
        let (a, b) = ([1; BYTES], [2; BYTES]);
        let proof = secret.prove(Role::Client, &a, &b);
        assert!(secret.verify(Role::Client, &a, &b, &proof));
        assert!(!secret.verify(Role::Server, &a, &b, &proof));
        assert!(!secret.verify(Role::Client, &b, &a, &proof));
        let other = StoreSecret::new(b"t").unwrap();
        assert!(!other.verify(Role::Client, &a, &b, &proof));
        assert!(StoreSecret::new(b"").is_err());
        assert_eq!(format!("{secret:?}"), "StoreSecret(..)");
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }

    /// Compares the MAC with test case 2 of RFC 4231, to check that it is standard HMAC-SHA256.
    #[test]
    fn the_mac_is_hmac_sha256() {
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        let expected = [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e];
        assert_eq!(mac.finalize().into_bytes()[..8], expected);
    }
}
