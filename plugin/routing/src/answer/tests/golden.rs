//! Golden answers of every interface, in every form.

use super::super::{End, Verdict, Why};

/// How an answer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GoldenForm {
    /// As events.
    Events,
    /// Unstreamed, in one piece.
    Whole,
    /// As compressed events.
    Compressed,
}

/// An answer and its expected verdict.
#[derive(Debug, Clone, Copy)]
pub(super) struct Golden {
    pub(super) name: &'static str,
    pub(super) mode: GoldenForm,
    pub(super) text: &'static str,
    pub(super) verdict: Verdict,
    pub(super) tokens: u64,
}

const fn golden(
    name: &'static str,
    mode: GoldenForm,
    verdict: Verdict,
    tokens: u64,
    text: &'static str,
) -> Golden {
    Golden {
        name,
        mode,
        text,
        verdict,
        tokens,
    }
}

const ITSELF: Verdict = Verdict::Ended(End::Itself);
const LIMIT: Verdict = Verdict::Ended(End::Limit);
const ERROR: Verdict = Verdict::Failed(Why::Error);
const GAVE_UP: Verdict = Verdict::Failed(Why::GaveUp);

pub(super) const GOLDEN: &[Golden] = &[
    golden(
        "a chat",
        GoldenForm::Events,
        ITSELF,
        3,
        concat!(
            ": a comment\n\n",
            "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
            "data:{\"choices\":[{\"delta\":{\"content\":\"\\u00e9\"}}],\"usage\":null}\n\n",
            "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
            "data: [DONE]\n\n",
        ),
    ),
    golden(
        "a chat that a limit ends, with usage",
        GoldenForm::Events,
        LIMIT,
        17,
        concat!(
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"length\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":17}}\n\n",
            "data: [DONE]\n\n",
        ),
    ),
    golden(
        "a chat that does not say why it ended",
        GoldenForm::Events,
        Verdict::Content,
        1,
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
    ),
    golden(
        "a chat of a role",
        GoldenForm::Events,
        Verdict::Empty,
        0,
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\ndata: [DONE]\n\n",
    ),
    golden(
        "a chat that fails",
        GoldenForm::Events,
        ERROR,
        0,
        "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\ndata: [DONE]\n\n",
    ),
    golden(
        "a chat that fails after a token",
        GoldenForm::Events,
        ERROR,
        1,
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"error\":{\"message\":\"no\"}}\n\n",
    ),
    golden(
        "a chat that is given up",
        GoldenForm::Events,
        GAVE_UP,
        1,
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n",
    ),
    golden(
        "a chat whose first word is that it is given up",
        GoldenForm::Events,
        Verdict::Empty,
        0,
        "data: {\"choices\":[{\"delta\":{\"content\":\"\"},\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n",
    ),
    golden(
        "data on several lines",
        GoldenForm::Events,
        ITSELF,
        1,
        "data: {\"choices\":[\ndata: {\"text\":\"a\",\"finish_reason\":\"stop\"}\ndata: ]}\n\n",
    ),
    golden(
        "completions",
        GoldenForm::Events,
        LIMIT,
        2,
        "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null},{\"index\":1,\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n",
    ),
    golden(
        "a response",
        GoldenForm::Events,
        ITSELF,
        5,
        concat!(
            "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"usage\":null}}\n\n",
            "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"message\"}}\n\n",
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
            "event: response.output_text.done\ndata: {\"type\":\"response.output_text.done\",\"text\":\"x\"}\n\n",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"usage\":{\"output_tokens\":5}}}\n\n",
        ),
    ),
    golden(
        "a response whose events have their names beside them only",
        GoldenForm::Events,
        LIMIT,
        1,
        concat!(
            "event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\n",
            "event: response.incomplete\ndata: {\"response\":{\"incomplete_details\":{\"reason\":\"max_output_tokens\"}}}\n\n",
        ),
    ),
    golden(
        "a response that fails",
        GoldenForm::Events,
        ERROR,
        0,
        "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n\n",
    ),
    golden(
        "messages",
        GoldenForm::Events,
        ITSELF,
        2,
        concat!(
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\"usage\":{\"output_tokens\":1}}}\n\n",
            "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
            "event: ping\ndata: {\"type\":\"ping\"}\n\n",
            "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n",
            "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
            "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":{\"output_tokens\":2}}\n\n",
            "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        ),
    ),
    golden(
        "messages that fail",
        GoldenForm::Events,
        ERROR,
        0,
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n",
    ),
    golden(
        "messages of nothing",
        GoldenForm::Events,
        Verdict::Empty,
        0,
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ),
    golden(
        "generate",
        GoldenForm::Events,
        ITSELF,
        3,
        concat!(
            "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":null,\"completion_tokens\":0}}\n\n",
            "data: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":null,\"completion_tokens\":2}}\n\n",
            "data: {\"text\":\"abc\",\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"},\"completion_tokens\":3}}\n\n",
            "data: [DONE]\n\n",
        ),
    ),
    golden(
        "generate that is given up",
        GoldenForm::Events,
        Verdict::Empty,
        0,
        "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"no\"},\"completion_tokens\":0}}\n\ndata: [DONE]\n\n",
    ),
    golden("nothing", GoldenForm::Events, Verdict::Empty, 0, ""),
    golden(
        "a chat in one piece",
        GoldenForm::Whole,
        ITSELF,
        1,
        r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}"#,
    ),
    golden(
        "a guard's immediate end in one piece",
        GoldenForm::Whole,
        ITSELF,
        1,
        r#"{"choices":[{"message":{"role":"assistant","content":""},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}"#,
    ),
    golden(
        "a chat without a reason in one piece",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"choices":[{"message":{"role":"assistant","content":"","tool_calls":[]},"finish_reason":null}],"usage":{"completion_tokens":0}}"#,
    ),
    golden(
        "no choices in one piece",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"object":"chat.completion","model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":0}}"#,
    ),
    golden(
        "a chat that is given up in one piece",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"choices":[{"message":{"role":"assistant","content":""},"finish_reason":"abort"}]}"#,
    ),
    golden(
        "a chat of which one choice is given up in one piece",
        GoldenForm::Whole,
        GAVE_UP,
        0,
        r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"},{"message":{"content":""},"finish_reason":"error"}]}"#,
    ),
    golden(
        "a chat of which one choice does not end in one piece",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"},{"message":{"content":""}}]}"#,
    ),
    golden(
        "completions in one piece",
        GoldenForm::Whole,
        LIMIT,
        3,
        r#"{"object":"text_completion","choices":[{"text":"a b c","finish_reason":"length"}],"usage":{"completion_tokens":3}}"#,
    ),
    golden(
        "an error in one piece",
        GoldenForm::Whole,
        ERROR,
        0,
        r#"{"object":"error","message":"no","code":500}"#,
    ),
    golden(
        "a response in one piece",
        GoldenForm::Whole,
        ITSELF,
        4,
        r#"{"object":"response","status":"completed","error":null,"output":[{"type":"message","content":[{"type":"output_text","text":"a"}]}],"text":{"format":{"type":"text"}},"usage":{"output_tokens":4}}"#,
    ),
    golden(
        "a response that failed in one piece",
        GoldenForm::Whole,
        ERROR,
        0,
        r#"{"object":"response","status":"failed","output":[]}"#,
    ),
    golden(
        "a response in the background",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        r#"{"object":"response","status":"queued","output":[],"usage":null}"#,
    ),
    golden(
        "messages in one piece",
        GoldenForm::Whole,
        LIMIT,
        2,
        r#"{"type":"message","role":"assistant","content":[{"type":"text","text":"a"}],"stop_reason":"max_tokens","usage":{"input_tokens":9,"output_tokens":2}}"#,
    ),
    golden(
        "messages of nothing in one piece",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"type":"message","role":"assistant","content":[{"type":"text","text":""}],"stop_reason":null,"usage":{"input_tokens":9,"output_tokens":0}}"#,
    ),
    golden(
        "generate in one piece",
        GoldenForm::Whole,
        ITSELF,
        2,
        r#"{"text":"ab","output_ids":[1,2],"meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":2}}"#,
    ),
    golden(
        "a batch of generate in one piece",
        GoldenForm::Whole,
        LIMIT,
        3,
        r#"[{"text":"ab","meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":2}},{"text":"c","meta_info":{"finish_reason":{"type":"length","length":1},"completion_tokens":1}}]"#,
    ),
    golden(
        "generate that is given up in one piece",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"text":"","meta_info":{"finish_reason":{"type":"abort"},"completion_tokens":0}}"#,
    ),
    golden(
        "tokens as ids in one piece",
        GoldenForm::Whole,
        ITSELF,
        0,
        r#"{"request_id":"r","choices":[{"index":0,"token_ids":[7],"logprobs":null,"finish_reason":"stop"}]}"#,
    ),
    golden(
        "embeddings",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        r#"{"object":"list","data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":3}}"#,
    ),
    golden(
        "what may mean anything",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        "{}",
    ),
    golden(
        "an answer that lacks its choices",
        GoldenForm::Whole,
        Verdict::Empty,
        0,
        r#"{"id":"c","object":"chat.completion","created":1,"model":"m"}"#,
    ),
    golden(
        "no JSON",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        "no healthy upstream",
    ),
    golden(
        "JSON that is cut",
        GoldenForm::Whole,
        Verdict::Content,
        0,
        r#"{"choices":["#,
    ),
    golden("white space", GoldenForm::Whole, Verdict::Empty, 0, " \n"),
    golden("no body", GoldenForm::Whole, Verdict::Empty, 0, ""),
    golden(
        "what is compressed",
        GoldenForm::Compressed,
        Verdict::Content,
        0,
        "\u{1f}data: [DONE]\n\n",
    ),
    golden(
        "nothing that is compressed",
        GoldenForm::Compressed,
        Verdict::Empty,
        0,
        "",
    ),
];
