package kube

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Surroundings watches what speakers tell of their nodes' networks: a text for each node, under the
// name of the ConfigMap.
func Surroundings(c *Client, namespace string, changed func(name string)) *Table[string, map[string]string] {
	table := newTable[string, map[string]string](nil, changed)
	c.register(resource{
		client: c.rest.core, name: "configmaps", namespace: namespace, example: &corev1.ConfigMap{},
		// what RBAC can allow by name
		fieldSelector: fields.OneTermEqualSelector("metadata.name", lb.SurroundingsConfigMap).String(),
	}, objects[string, map[string]string, *corev1.ConfigMap]{table, func(o *corev1.ConfigMap) (string, map[string]string) {
		return o.Name, o.Data
	}})
	return table
}

// TellSurroundings sets what nodes tell of their networks, and leaves the entries of others alone;
// nil removes an entry.
func (c *Client) TellSurroundings(ctx context.Context, namespace string, entries map[string]*string) error {
	body, err := json.Marshal(map[string]any{"data": entries})
	if err != nil {
		return fmt.Errorf("encode ConfigMap %s/%s: %w", namespace, lb.SurroundingsConfigMap, err)
	}
	maps := c.core.ConfigMaps(namespace)
	_, err = maps.Patch(ctx, lb.SurroundingsConfigMap, types.MergePatchType, body, metav1.PatchOptions{})
	if !apierrors.IsNotFound(err) {
		return wrap(err, "write", namespace)
	}
	data := map[string]string{}
	for node, text := range entries {
		if text != nil {
			data[node] = *text
		}
	}
	if len(data) == 0 {
		return nil
	}
	_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: lb.SurroundingsConfigMap}, Data: data},
		metav1.CreateOptions{})
	return wrap(err, "create", namespace)
}

func wrap(err error, verb, namespace string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s ConfigMap %s/%s: %w", verb, namespace, lb.SurroundingsConfigMap, err)
}
