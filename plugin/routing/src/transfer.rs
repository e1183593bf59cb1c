//! Owns the members that carry hand-offs, of all protocols: no client may set them, and none gets them in an answer.

/// A member that carries a hand-off. Only this module makes one, so that no engine hands over by a member which a client could
/// set. A new one has its place in the lists below, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferField(&'static str);

impl TransferField {
    /// Its name.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

/// vLLM's, whatever the connector.
pub const KV_TRANSFER: TransferField = TransferField("kv_transfer_params");
/// TensorRT-LLM's.
pub const DISAGGREGATED: TransferField = TransferField("disaggregated_params");
/// SGLang's host of the bootstrap server.
pub const BOOTSTRAP_HOST: TransferField = TransferField("bootstrap_host");
/// SGLang's port of the bootstrap server.
pub const BOOTSTRAP_PORT: TransferField = TransferField("bootstrap_port");
/// SGLang's room, in which both legs meet.
pub const BOOTSTRAP_ROOM: TransferField = TransferField("bootstrap_room");

/// Names of those in requests, in the order in which an error names the first.
pub const IN_REQUESTS: [&str; 5] = [
    KV_TRANSFER.name(),
    BOOTSTRAP_HOST.name(),
    BOOTSTRAP_PORT.name(),
    BOOTSTRAP_ROOM.name(),
    DISAGGREGATED.name(),
];

/// Names of those in prefill's answers.
pub const IN_ANSWERS: [&str; 2] = [KV_TRANSFER.name(), DISAGGREGATED.name()];
