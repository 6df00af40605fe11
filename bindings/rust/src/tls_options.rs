//! TLS of a worker by certificates.
use crate::{ffi::RawTlsOptions, safetensors::text_of_path, Result};
use std::path::{Path, PathBuf};

// The flags of `dg_tls_options`.
const ENCRYPT_LOCAL: u64 = 1;
const NO_ENCRYPT_LOCAL: u64 = 2;

/// The certificates of a worker, in the place of a key file or beside one: for jobs whose platform
/// issues them. What is not set is as the variable in the environment says that its setter names;
/// a certificate and its key are set both or neither. docs/security.md, "Certificates".
///
/// ```
/// let tls = distgrad::TlsOptions::new()
///     .cert("/var/run/tls/tls.crt")
///     .key("/var/run/tls/tls.key")
///     .ca("/var/run/tls/ca.crt");
/// # let _ = distgrad::WorkerOptions::new().tls(tls);
/// ```
///
/// [`WorkerOptions::create`](crate::WorkerOptions::create) fails with `Code::InvalidArgument`, and
/// names the option and the variable, where one is missing or its file cannot be used.
#[doc(alias = "dg_tls_options")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
    name: String,
    flags: u64,
}

impl TlsOptions {
    /// All as the environment says.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets a PEM file with this process's certificate, and then those between it and the
    /// authority. Default: `DISTGRAD_TLS_CERT`.
    pub fn cert(mut self, file: impl AsRef<Path>) -> Self {
        self.cert = file.as_ref().to_owned();
        self
    }
    /// Sets a PEM file with the certificate's private key, without a passphrase. Default:
    /// `DISTGRAD_TLS_KEY`.
    pub fn key(mut self, file: impl AsRef<Path>) -> Self {
        self.key = file.as_ref().to_owned();
        self
    }
    /// Sets a PEM file with the authorities whose certificates are accepted. Default:
    /// `DISTGRAD_TLS_CA`.
    pub fn ca(mut self, file: impl AsRef<Path>) -> Self {
        self.ca = file.as_ref().to_owned();
        self
    }
    /// Sets the name that the others' certificates have to have: a DNS name, an IP address or a
    /// URI. Default: `DISTGRAD_TLS_NAME`, or one of those that this process's own has, but for
    /// localhost and loopback addresses, which every machine has.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Sets whether Unix-domain sockets are encrypted too, by certificates or the cluster key.
    /// Default: as `DISTGRAD_ENCRYPT_LOCAL` says, or false.
    #[doc(alias = "DG_TLS_ENCRYPT_LOCAL")]
    #[doc(alias = "DG_TLS_NO_ENCRYPT_LOCAL")]
    pub fn encrypt_local(mut self, encrypt: bool) -> Self {
        self.flags = if encrypt { ENCRYPT_LOCAL } else { NO_ENCRYPT_LOCAL };
        self
    }

    pub(crate) fn raw(&self) -> Result<RawTlsOptions> {
        Ok(RawTlsOptions {
            cert: text_of_path(&self.cert)?.to_owned(),
            key: text_of_path(&self.key)?.to_owned(),
            ca: text_of_path(&self.ca)?.to_owned(),
            name: self.name.clone(),
            flags: self.flags,
        })
    }
}
