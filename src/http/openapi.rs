//! GET /openapi.json: the API's description, made from the types that parse and answer.

use axum::Json;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{health, models, openai, tokenize};

/// The description.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "flashd",
        description = "OpenAI-compatible API of a DeepSeek-V4-Flash server. null means absent; unknown fields are ignored.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    paths(
        openai::chat::chat_completions,
        openai::completions::completions,
        models::list,
        models::get,
        tokenize::tokenize,
        tokenize::detokenize,
        health::livez,
        health::health,
        health::readyz,
        health::ping,
        health::metrics,
        health::version,
    ),
    modifiers(&Security),
)]
pub struct ApiDoc;

struct Security;

impl Modify for Security {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("Or x-api-key.")).build();
        let components = openapi.components.get_or_insert_default();
        components.security_schemes.insert("api_key".to_owned(), SecurityScheme::Http(scheme).into());
    }
}

/// The description as JSON.
pub async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(ApiDoc::openapi())
}
