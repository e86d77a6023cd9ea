package kube

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// Media types of patches.
const (
	MergePatch = string(types.MergePatchType)
	ApplyPatch = string(types.ApplyPatchType)
)

// Send sends a request with a JSON body, if any, to a URI of the API server, which may have a query,
// and returns the answer. The answer to a GET or DELETE of what does not exist is nil.
func (c *Client) Send(ctx context.Context, verb, uri, contentType string, body []byte) ([]byte, error) {
	request := c.rest.core.Verb(verb).RequestURI(uri).SetHeader("Accept", "application/json")
	if body != nil {
		request = request.SetHeader("Content-Type", contentType).Body(body)
	}
	raw, err := request.Do(ctx).Raw()
	switch {
	case apierrors.IsNotFound(err) && (verb == http.MethodGet || verb == http.MethodDelete):
		return nil, nil
	case err != nil:
		path, _, _ := strings.Cut(uri, "?")
		return nil, fmt.Errorf("%s %s: %w", strings.ToLower(verb), path, err)
	}
	return raw, nil
}
