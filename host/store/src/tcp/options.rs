//! Options of a TCP store client: protocol and secret.

use core::str::FromStr;

use crate::StoreSecret;
use crate::{Error, Result};

/// Protocol of a TCP store server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreProtocol {
    /// Detected at the first connection.
    #[default]
    Auto,
    /// The protocol of PyTorch 2.1 and later, and of
    /// [`TcpStoreServer`](crate::TcpStoreServer).
    Current,
    /// The protocol of PyTorch before 2.1.
    Legacy,
}

impl FromStr for StoreProtocol {
    type Err = Error;

    /// Parses `auto`, `current` or `legacy`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "current" => Ok(Self::Current),
            "legacy" => Ok(Self::Legacy),
            _ => Err(Error::invalid(
                "store options",
                format!("FUSEWIRE_STORE_PROTOCOL=\"{text}\" must be auto, current or legacy"),
            )),
        }
    }
}

/// Options of a client's connections.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Protocol of the server.
    pub protocol: StoreProtocol,
    /// Secret that the client and the server must share.
    pub secret: Option<StoreSecret>,
}

impl StoreOptions {
    /// Returns the protocol in `FUSEWIRE_STORE_PROTOCOL` (`auto`, `current` or `legacy`; by default
    /// `auto`) and the secret in `FUSEWIRE_STORE_SECRET`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the protocol has another value.
    pub fn from_env() -> Result<Self> {
        let protocol = match std::env::var("FUSEWIRE_STORE_PROTOCOL") {
            Ok(text) if !text.is_empty() => text.parse()?,
            _ => StoreProtocol::Auto,
        };
        let secret = StoreSecret::from_env();
        Ok(Self { protocol, secret })
    }

    /// Returns these options with `protocol`.
    #[must_use]
    pub fn with_protocol(mut self, protocol: StoreProtocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// Returns these options with `secret`.
    #[must_use]
    pub fn with_secret(mut self, secret: StoreSecret) -> Self {
        self.secret = Some(secret);
        self
    }
}
